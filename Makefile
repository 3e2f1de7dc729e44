# Two commands on a fresh machine: `make run` and `make test`. Each target calls one command.
VENV := .venv
# torchrun and multigpu must be found by name, as in a shell where the environment is active.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: help run test lab bench slurm-up slurm-down clean

help:
	@echo "make run         train lesson 05 here, on all GPUs or on two CPU processes"
	@echo "make test        run all tests"
	@echo "make lab         open the course in JupyterLab"
	@echo "make bench       measure what the README's figures say"
	@echo "make slurm-up    start the classroom cluster: a real Slurm on this machine"
	@echo "make slurm-down  end it"

run: $(VENV)/installed
	python scripts/PT_CNN_MultiGPU.py --spawn auto --prove

# Two workers, a file each; what needs the one classroom cluster, and the notebooks, have the machine for themselves.
test: $(VENV)/installed
	multigpu slurm install --with-mpi || true
	ruff check . && ruff format --check .
	multigpu notebooks check
	pytest tests -m "not classroom" --numprocesses=2 --dist=loadfile
	pytest tests -m classroom
	pytest notebooks

lab: $(VENV)/installed
	python -m jupyterlab --config=lessons/.jupyter/lab.py

bench: $(VENV)/installed
	python benchmarks/lesson05.py
	python benchmarks/vgpu_speed.py
	python benchmarks/vgpu_fidelity.py
	python benchmarks/routes.py
	python benchmarks/trainer.py
	python benchmarks/link.py
	python benchmarks/swap.py

slurm-up: $(VENV)/installed
	multigpu slurm up

slurm-down: $(VENV)/installed
	multigpu slurm down

# Made anew when what is needed changes. The stamp comes last, so a broken install is repeated.
$(VENV)/installed: pyproject.toml constraints.txt
	@python3 -c 'import sys; sys.exit("error: Python 3.11 or newer is needed, this is %d.%d." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@test -x $(VENV)/bin/pip || python3 -m venv $(VENV) || { rm -rf $(VENV); \
		echo "error: python3 cannot make virtual environments: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV): torch, TensorFlow and the rest take some minutes"
	@$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[lab,tensorflow,test]'
	@touch $@

clean:
	rm -rf $(VENV) results
