# The course in a container, for macOS, Windows and what else has an engine for Linux containers.
# Its steps were tried without an engine (make test-container, tests/container/report.md).
#
#   docker build -t multigpu .
#   docker run --rm -it -p 127.0.0.1:8888:8888 -v "$PWD/my-copy:/course/my-copy" multigpu
#
# The second command starts JupyterLab; `… multigpu bash` is a shell. TORCH= takes the CUDA build of
# PyTorch, for `docker run --gpus all`: docker build --build-arg TORCH= -t multigpu .
FROM debian:bookworm-slim
ARG TORCH=cpu
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates git make python3 python3-venv
# Outside of /course, so that the environment stays if a folder is mounted there.
ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH
WORKDIR /course
COPY . .
RUN make install TORCH=$TORCH
# The classroom cluster, and the sandbox of exercises.
RUN multigpu slurm install --with-mpi --with-bubblewrap
# JupyterLab is reached from outside of the container, through the port that -p publishes.
ENV JUPYTER_IP=0.0.0.0
CMD ["make", "lab"]
