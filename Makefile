# `make run` and `make test` are the two commands for a fresh machine. Each target calls one command.
#   VENV=folder     the virtual environment, also an absolute path (a cluster's scratch disk, say)
#   PYTHON=program  the Python that makes it
#   TORCH=cpu       install PyTorch's CPU build from PyTorch's own index
# pip obeys its own variables: HTTPS_PROXY=http://HOST:PORT behind a proxy; on a machine without a network
# PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER, after `pip download --dest FOLDER -c constraints.txt '.[lab,slurm,tensorflow,test]'
# 'setuptools>=77'` elsewhere.
VENV ?= .venv
PYTHON ?= python3
TORCH ?=
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PACKAGES ?= --editable '.[lab,slurm,tensorflow,test]'

BIN := $(abspath $(VENV))/bin
INSTALLED := $(abspath $(VENV))/installed
SITE := $(abspath $(VENV))/site-installed
# `torchrun` and `multigpu` are found by name, as in a shell in which the environment is active.
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Without an answer pip would try again for each package, for minutes.
CPU_INDEX_FAILS = $(BIN)/pip index versions torch --index-url $(TORCH_CPU_INDEX) --retries 0 --timeout 5 -vv 2>&1 | \
	grep -q "Could not fetch URL $(TORCH_CPU_INDEX)"

# An index that the user has set wins.
ifeq ($(TORCH),cpu)
export PIP_EXTRA_INDEX_URL ?= $(TORCH_CPU_INDEX)
BUILD := PyTorch's CPU build, 0.2 GB, from $(PIP_EXTRA_INDEX_URL)
else ifneq ($(PIP_EXTRA_INDEX_URL),)
BUILD := the build of PyTorch that pip prefers, also from $(PIP_EXTRA_INDEX_URL)
else
BUILD := the build of PyTorch that pip prefers: on Linux x86_64 the CUDA build, 2.8 GB (TORCH=cpu takes the CPU build, 0.2 GB)
endif

.PHONY: help install run test test-quick test-real test-long test-mutations test-grading test-attacks test-faults test-jobs test-peer test-outside test-prove test-site test-container site lint my-copy lab bench gpu-check slurm-up slurm-down clean

help:
	@echo "make install     install into .venv; VENV=folder takes another, TORCH=cpu the CPU build of PyTorch"
	@echo "make run         install, then train lesson 05 on all GPUs or on two CPU processes, and prove it"
	@echo "make test        run all tests"
	@echo "make test-quick  run what needs under two minutes, before a commit"
	@echo "make test-real   run all tests, every program really started"
	@echo "make test-long   run the tests that make test leaves out for their time"
	@echo "make test-mutations  break the behaviours of mutations.toml: each must turn a test red"
	@echo "make test-grading  grade answers with known scores, and answers without work, all lessons"
	@echo "make test-attacks  grade submissions that attack the grader, and write a report"
	@echo "make test-faults  kill an elastic run 110 times; N=200 writes the report that README.md quotes"
	@echo "make test-jobs   stop jobs of a real Slurm in each way that a cluster has, and run jobs on virtual GPUs"
	@echo "make test-peer FROM=folder  run Lightning's own tests, from a checkout of it, on this Trainer"
	@echo "make test-outside FROM=folder  run public CUDA scripts, from checkouts of them, under multigpu virtual"
	@echo "make test-prove  plant all faults into programs, and prove right programs of all kinds"
	@echo "make lint        check style, layers, and that notebooks match their scripts"
	@echo "make my-copy     write your own notebooks to my-copy/, without outputs; keep those you have"
	@echo "make lab         the same, then open them in JupyterLab"
	@echo "make site        build the site: pages and notebooks with search, in build/site"
	@echo "make test-site   open it in a browser, page by page"
	@echo "make test-container  make the file system of Dockerfile with debootstrap, and try it, as root"
	@echo "make bench       measure the figures of the README"
	@echo "make gpu-check   on a machine with an NVIDIA GPU: check the PyTorch lessons and the virtual GPUs"
	@echo "make slurm-up    start the classroom cluster, a real Slurm on this machine"
	@echo "make slurm-down  stop it"

install: $(INSTALLED)

# A rank for each GPU, or two on the CPU; a power of two, which divides the batch of 64.
run: export OMP_NUM_THREADS ?= 1
run: TORCHRUN := torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node
run: $(INSTALLED)
	@echo "training lesson 05, then proving that two ranks compute what one GPU computes: under a minute on 2 cores"
	@ranks=$$(python -c 'import torch; print(2 ** ((torch.cuda.device_count() or 2).bit_length() - 1))') && \
	$(TORCHRUN)=$$ranks scripts/PT_CNN_MultiGPU.py && \
	multigpu prove $(TORCHRUN)=2 scripts/PT_CNN_MultiGPU.py

lint: $(INSTALLED)
	@echo "checking style, layers and notebooks"
	ruff check . && ruff format --check .
	lint-imports
	multigpu notebooks check

test-quick: lint
	@echo "testing the library: under two minutes"
	pytest tests/library tests/strategies tests/trainer tests/virtual tests/exercise tests/grading -m "not classroom and not slow and not long" --numprocesses=2

# Four workers take a file each, because tests often wait: for a job in the queue, or a time limit.
# A test that fails beside others runs once more, alone. What passes only then has a race, and is named.
test: lint
	@echo "running all tests: about 15 minutes on 2 cores"
	multigpu slurm install --with-mpi --with-bubblewrap || true
	pytest --numprocesses=4 --cache-clear || { test $$? = 1 && python tests/support/failed.py; }

# As `test`, but each program of a test starts Python anew instead of in a fork, which takes longer.
test-real: lint
	REAL_START=1 pytest --numprocesses=3 -m ''

# Your own notebooks, without outputs and guesses; what is in my-copy/ already is kept.
my-copy: $(INSTALLED)
	@multigpu notebooks copy

# Jupyter, IPython, matplotlib and node write into this folder, not into your home.
lab: export JUPYTER_CONFIG_DIR := $(CURDIR)/my-copy/.jupyter
lab: export JUPYTER_DATA_DIR := $(CURDIR)/my-copy/.jupyter/data
lab: export JUPYTER_RUNTIME_DIR := $(CURDIR)/my-copy/.jupyter/runtime
lab: export JUPYTERLAB_WORKSPACES_DIR := $(CURDIR)/my-copy/.jupyter/workspaces
lab: export IPYTHONDIR := $(CURDIR)/my-copy/.jupyter/ipython
lab: export MPLCONFIGDIR := $(CURDIR)/my-copy/.jupyter/matplotlib
lab: export NPM_CONFIG_CACHE := $(CURDIR)/my-copy/.jupyter/npm
lab: my-copy
	@echo "starting JupyterLab, a few seconds; Ctrl-C twice ends it; it writes into $(CURDIR) only"
	@python -m jupyterlab --config=lessons/.jupyter/lab.py

test-long: $(INSTALLED)
	@echo "running the tests that make test leaves out for their time: about 8 minutes on 2 cores"
	pytest -m long tests --numprocesses=2

test-mutations: $(INSTALLED)
	@echo "breaking the behaviours of mutations.toml, and running tests after each"
	python tests/mutations/run.py

test-grading: $(INSTALLED)
	@echo "grading about 800 answers with known scores: about 30 minutes on 2 cores"
	ALL_LESSONS=1 pytest tests/grading/test_known_scores.py tests/grading/test_worth.py

test-attacks: $(INSTALLED)
	@echo "grading about 175 attacks beside honest submissions: about 5 minutes on 2 cores"
	ALL_ATTACKS=1 pytest tests/grading/test_attacks.py

test-faults: $(INSTALLED)
	@echo "killing an elastic run at random moments: 20 minutes on 2 cores, 35 with N=200; it goes on where it stopped"
	@pytest -q tests/faults/long_cases.py
	@python tests/faults/run.py $(N)

test-jobs: $(INSTALLED)
	@echo "stopping jobs of the classroom cluster, every job file, and every script on virtual GPUs: 25 minutes on 2 cores"
	ALL_JOBS=1 pytest tests/cluster/test_requeue.py --durations=0
	ALL_JOBS=1 pytest tests/cluster/test_jobfiles.py --durations=0

test-peer: $(INSTALLED)
	ALL_PEER=1 pytest tests/repo/test_peer.py
	@python tests/peer/run.py "$(FROM)"

test-outside: $(INSTALLED)
	@python tests/outside/run.py "$(FROM)"

test-prove: $(INSTALLED)
	@echo "proving about 145 programs with and without a fault, and 50 right ones: 10 minutes on 2 cores"
	ALL_PROOFS=1 pytest tests/prove --numprocesses=2

# The same files that GitHub and JupyterLab show, with search and dark mode; nothing comes from outside.
site: $(SITE)
	@rm -rf build/site
	@sphinx-build -q -W --keep-going -c docs . build/site
	@echo "build/site/index.html opens the site, without a server"

test-site: site
	@echo "opening each page of the site in Chromium: about 2 minutes"
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[browser]'
	pytest -q tests/site/browser.py

test-container: $(INSTALLED)
	@echo "making Dockerfile's file system and trying it, without an engine: 10 minutes on 2 cores"
	@python tests/container/run.py

bench: $(INSTALLED)
	@echo "measuring the README's figures: do not use the machine meanwhile"
	python benchmarks/lesson05.py
	python benchmarks/vgpu_speed.py
	python benchmarks/vgpu_fidelity.py
	python benchmarks/vtrain.py
	python benchmarks/routes.py
	python benchmarks/trainer.py
	python benchmarks/strategies.py
	python benchmarks/link.py
	python benchmarks/swap.py
	python benchmarks/elastic.py
	python benchmarks/scaling.py
	python benchmarks/virtual.py
	python benchmarks/world.py
	python benchmarks/finetune.py

# It needs no environment of its own: PYTHON= is a Python 3.11 or newer with torch, scikit-learn and
# matplotlib. An environment in .venv is used if it is there.
gpu-check:
	@$(PYTHON) benchmarks/gpu_check.py

slurm-up: $(INSTALLED)
	multigpu slurm up

slurm-down: $(INSTALLED)
	multigpu slurm down

# pip runs again when the requirements change. The file comes last, so that a failed install is repeated.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("error: Python 3.11 or newer is needed, and $(PYTHON) is %d.%d: give another with PYTHON=, on a cluster often after module load python." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "error: $(PYTHON) cannot make virtual environments: apt-get install python3-venv"; exit 1; }
	@test "$(PIP_EXTRA_INDEX_URL)" != "$(TORCH_CPU_INDEX)" || ! $(CPU_INDEX_FAILS) || { \
		own=$$($(BIN)/pip config list | grep -v ^:env:.extra | grep -E 'index-url|find-links' | paste -sd ' '); \
		echo "error: $(TORCH_CPU_INDEX), which has PyTorch's CPU build, does not answer: name another index by PIP_EXTRA_INDEX_URL=ADDRESS before make, or leave TORCH=cpu out, if pip's own sources have that build ($${own:-only its default index, which has the CUDA build for Linux})."; exit 1; }
	@echo "installing into $(VENV): $(BUILD), then TensorFlow, JupyterLab and the rest, 0.5 GB; 3 GB on disk with the CPU build; some minutes without output"
	@$(BIN)/pip install --quiet --constraint constraints.txt $(PACKAGES)
	@touch $@
	@test "$(VENV)" = .venv || echo "job files use this environment after: export COURSE_ENV=$(abspath $(VENV))"

$(SITE): $(INSTALLED)
	@echo "installing Sphinx into $(VENV)"
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[site]'
	@touch $@

clean:
	rm -rf $(VENV) results .jupyter
