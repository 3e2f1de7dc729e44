"""activate.sh finds the environment of a script in each place where a cluster may keep it.

Here an environment is a folder whose bin/python exits with 0 if it has the packages.
"""

import os
import shutil
from pathlib import Path

import pytest
from commands import ROOT
from job_shell import programs, run_job


def environment(folder: Path, packages: str = "torch multigpu") -> Path:
    """An environment with these packages: its python is asked for some, and exits."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/activate").write_text(f'export PATH="{folder}/bin:$PATH"\n')
    cases = "".join(f"{name}) ;; " for name in packages.split())
    (folder / "bin/python").write_text(
        f"#!/bin/sh\nshift 2\nfor name; do case $name in {cases}*) exit 1;; esac; done\n"
    )
    (folder / "bin/python").chmod(0o755)
    return folder


@pytest.fixture
def activate(tmp_path: Path):
    """activate(shell, path, **variables): the exit code of activate.sh, and its last line.

    If it ends with 0, the path of the environment's python.
    """
    shutil.copy(ROOT / "slurm/activate.sh", tmp_path)
    bin_folder = programs(tmp_path / "bin", python="exit 1\n")

    def run(shell: str = "", path: Path | None = None, **variables: str) -> tuple[int, str]:
        imports = variables.pop("imports", "torch multigpu").split()
        (tmp_path / "mine.py").write_text("".join(f"import {name}\n" for name in imports))
        (tmp_path / "job").write_text(
            f"{shell}\nscript=mine.py\nsource ./activate.sh || exit\necho went on\n"
        )
        active = f"{path}/bin:" if path else ""
        variables = {"PATH": f"{active}{bin_folder}:/usr/bin:/bin"} | variables
        done = run_job(tmp_path, "job", **variables)
        lines = done.text.splitlines()
        assert (done.code == 0) == (lines[-1] == "went on"), done
        if done.code:
            assert lines[-1].startswith("error: "), done
            return done.code, lines[-1]
        return 0, lines[-2].partition(" on ")[0]

    return run


def fake_conda(*environments: Path) -> str:
    cases = "".join(
        f'{folder.name}|{folder}) export PATH="{folder}/bin:$PATH";; '
        for folder in environments
    )
    return (
        f'conda() {{ [ "$1" = activate ] || return 1; '
        f'case "$2" in {cases} *) echo no such >&2; return 1;; esac; }}'
    )


def test_the_active_environment_comes_first(tmp_path: Path, activate):
    active = environment(tmp_path / "active")
    environment(tmp_path / ".venv")
    assert activate(path=active) == (0, f"{active}/bin/python")


def test_the_venv_comes_before_the_conda_environment(tmp_path: Path, activate):
    environment(tmp_path / ".venv")
    conda = fake_conda(environment(tmp_path / "multigpu"))
    assert activate(conda) == (0, f"{tmp_path}/.venv/bin/python")


def test_the_conda_environment(tmp_path: Path, activate):
    environment(tmp_path / ".venv", packages="")
    conda = fake_conda(environment(tmp_path / "multigpu"))
    assert activate(conda) == (0, f"{tmp_path}/multigpu/bin/python")


def test_conda_without_its_shell_function(tmp_path: Path, activate):
    made = environment(tmp_path / "multigpu")
    program = tmp_path / "conda-program"
    is_hook = "[ \"$1 $2\" = 'shell.bash hook' ]"
    program.write_text(f"#!/bin/sh\n{is_hook} && cat <<'END'\n{fake_conda(made)}\nEND\n")
    program.chmod(0o755)
    assert activate(CONDA_EXE=str(program)) == (0, f"{made}/bin/python")


def test_course_env_comes_before_all(tmp_path: Path, activate):
    active = environment(tmp_path / "active")
    chosen = environment(tmp_path / "chosen")
    expected = (0, f"{chosen}/bin/python")
    assert activate(path=active, COURSE_ENV=str(chosen)) == expected
    assert activate(fake_conda(chosen), path=active, COURSE_ENV="chosen") == expected


def test_a_course_env_that_does_not_work(tmp_path: Path, activate):
    active = environment(tmp_path / "active")
    broken = environment(tmp_path / "broken", packages="numpy")
    code, message = activate(path=active, COURSE_ENV=str(broken))
    assert code == 2 and "multigpu torch, which mine.py imports" in message
    assert f"python is {broken}/bin/python" in message and "COURSE_ENV" in message
    code, message = activate(path=active, COURSE_ENV="/nowhere")
    assert code == 2 and "COURSE_ENV is '/nowhere'" in message


def test_modules_are_loaded_first(tmp_path: Path, activate):
    loaded = environment(tmp_path / "loaded")
    module = (
        f'module() {{ [ "$*" = "load python/3.11 cuda" ] && '
        f'export PATH="{loaded}/bin:$PATH"; }}'
    )
    found = activate(module, COURSE_MODULES="python/3.11 cuda")
    assert found == (0, f"{loaded}/bin/python")
    code, message = activate(module, COURSE_MODULES="python/2.7")
    assert code == 2 and "'python/2.7'" in message and "module avail" in message
    # a site without modules
    assert activate(COURSE_MODULES="python/3.11")[0] == 2


def test_an_environment_needs_what_the_script_imports_only(tmp_path: Path, activate):
    """Without multigpu for a script of plain torch, without torch for one of TensorFlow."""
    for imports in ("torch", "tensorflow"):
        own = environment(tmp_path / imports, packages=imports)
        assert activate(path=own, imports=imports) == (0, f"{own}/bin/python")
        code, message = activate(path=own, imports=f"{imports} multigpu")
        assert code == 2 and "multigpu" in message


@pytest.mark.parametrize(
    ("line", "needs", "said"),
    [
        ("model.cuda()", "", True),
        ("model.cuda()", "no", False),
        ('device = "cuda" if torch.cuda.is_available() else "cpu"', "", False),
    ],
)
def test_a_script_that_needs_cuda_on_the_classroom_cluster(
    tmp_path: Path, activate, line, needs, said
):
    own = environment(tmp_path / "own")
    shell = f"exec 2> notes\ncat >> mine.py <<'END'\n{line}\nEND"
    variables = {"SLURM_CLUSTER_NAME": "multigpu-classroom", "NEEDS_CUDA": needs}
    assert activate(shell, path=own, **variables) == (0, f"{own}/bin/python")
    note = "If mine.py needs it, submit again with NEEDS_CUDA=yes"
    assert (note in (tmp_path / "notes").read_text()) == said


def test_multigpu_in_the_current_folder_does_not_count(tmp_path: Path, activate):
    """A python that finds multigpu only in the current folder finds none in a script."""
    (tmp_path / "multigpu").mkdir()
    (tmp_path / "multigpu/__init__.py").touch()
    bare = environment(tmp_path / "bare")
    real = os.path.realpath(shutil.which("python3", path="/usr/bin:/bin") or "")
    if not real:
        pytest.skip("needs a python3 of the system")
    (bare / "bin/python").write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    assert activate(path=bare, imports="json multigpu")[0] == 2


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"SLURM_GPUS_ON_NODE": ""}, 2),
        ({}, 0),
        # the shell of salloc, on the login node
        ({"SLURM_GPUS_ON_NODE": "", "SLURMD_NODENAME": ""}, 0),
    ],
    ids=["no GPU", "2 GPUs", "salloc"],
)
def test_a_job_without_gpus(tmp_path: Path, activate, variables: dict, code: int):
    found, text = activate(path=environment(tmp_path / "active"), **variables)
    assert found == code
    assert code == 0 or ("no GPU" in text and "--gpus-per-node" in text)
