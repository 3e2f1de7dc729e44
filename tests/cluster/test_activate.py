"""activate.sh finds the course's environment in each place where a cluster may keep it.

Here an environment is a folder whose bin/python exits with 0 if it has torch and multigpu.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import ROOT


def environment(folder: Path, works: bool = True) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/activate").write_text(f'export PATH="{folder}/bin:$PATH"\n')
    (folder / "bin/python").write_text(f"#!/bin/sh\nexit {0 if works else 1}\n")
    (folder / "bin/python").chmod(0o755)
    return folder


def activate(
    root: Path, shell: str = "", path: Path | None = None, **variables: str
) -> tuple[int, str]:
    """Source activate.sh in a shell without a profile.

    Returns the exit code, and the environment's python or the error message.
    """
    (root / "slurm").mkdir(exist_ok=True)
    shutil.copy(ROOT / "slurm/activate.sh", root / "slurm")
    active = path or environment(root / "none", works=False)
    commands = f"{shell}\nsource slurm/activate.sh || exit\necho went on"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", commands],
        env={"PATH": f"{active}/bin:/usr/bin:/bin", "HOME": str(root), **variables},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == ("went on" in done.stdout) == (not done.stderr), done
    if done.returncode:
        return done.returncode, done.stderr.strip()
    return done.returncode, done.stdout.splitlines()[0].removeprefix("environment: ")


def fake_conda(*environments: Path) -> str:
    cases = "".join(
        f'{folder.name}|{folder}) export PATH="{folder}/bin:$PATH";; '
        for folder in environments
    )
    return (
        f'conda() {{ [ "$1" = activate ] || return 1; '
        f'case "$2" in {cases} *) echo no such >&2; return 1;; esac; }}'
    )


def test_activate_keeps_the_active_environment(tmp_path: Path):
    active = environment(tmp_path / "active")
    environment(tmp_path / ".venv")
    assert activate(tmp_path, path=active) == (0, f"{active}/bin/python")


def test_activate_finds_the_repositorys_venv(tmp_path: Path):
    environment(tmp_path / ".venv")
    conda = fake_conda(environment(tmp_path / "multigpu"))
    assert activate(tmp_path, conda) == (0, f"{tmp_path}/.venv/bin/python")


def test_activate_finds_the_conda_environment(tmp_path: Path):
    environment(tmp_path / ".venv", works=False)
    conda = fake_conda(environment(tmp_path / "multigpu"))
    assert activate(tmp_path, conda) == (0, f"{tmp_path}/multigpu/bin/python")


def test_activate_runs_the_conda_program_without_the_shell_function(tmp_path: Path):
    made = environment(tmp_path / "multigpu")
    program = tmp_path / "conda-program"
    is_hook = "[ \"$1 $2\" = 'shell.bash hook' ]"
    program.write_text(f"#!/bin/sh\n{is_hook} && cat <<'END'\n{fake_conda(made)}\nEND\n")
    program.chmod(0o755)
    assert activate(tmp_path, CONDA_EXE=str(program)) == (0, f"{made}/bin/python")


def test_activate_uses_course_env(tmp_path: Path):
    active = environment(tmp_path / "active")
    chosen = environment(tmp_path / "chosen")
    expected = (0, f"{chosen}/bin/python")
    assert activate(tmp_path, path=active, COURSE_ENV=str(chosen)) == expected
    conda = fake_conda(chosen)
    assert activate(tmp_path, conda, path=active, COURSE_ENV="chosen") == expected


def test_activate_refuses_a_course_env_that_does_not_work(tmp_path: Path):
    active = environment(tmp_path / "active")
    broken = environment(tmp_path / "broken", works=False)
    code, message = activate(tmp_path, path=active, COURSE_ENV=str(broken))
    assert code == 1 and "torch" in message and "multigpu" in message and "\n" not in message
    assert f"COURSE_ENV is '{broken}'" in message
    code, message = activate(tmp_path, path=active, COURSE_ENV="/nowhere")
    assert code == 1 and "COURSE_ENV is '/nowhere'" in message and "\n" not in message


def test_activate_loads_modules_first(tmp_path: Path):
    loaded = environment(tmp_path / "loaded")
    module = (
        f'module() {{ [ "$*" = "load python/3.11 cuda" ] && '
        f'export PATH="{loaded}/bin:$PATH"; }}'
    )
    code, python = activate(tmp_path, module, COURSE_MODULES="python/3.11 cuda")
    assert (code, python) == (0, f"{loaded}/bin/python")
    shutil.rmtree(tmp_path / "none")
    code, message = activate(tmp_path, module, COURSE_MODULES="python/2.7")
    assert code == 1 and "\n" not in message
    assert "COURSE_MODULES is 'python/2.7'" in message and "module avail" in message
    shutil.rmtree(tmp_path / "none")
    # a site without modules
    assert activate(tmp_path, COURSE_MODULES="python/3.11")[0] == 1


def test_activate_without_any_environment(tmp_path: Path):
    code, message = activate(tmp_path)
    assert code == 1 and "\n" not in message
    assert message.startswith("error: no Python environment with torch and multigpu")


def test_activate_ignores_multigpu_in_the_current_directory(tmp_path: Path):
    """A python that finds multigpu only in the current directory finds none in a script."""
    (tmp_path / "site/torch").mkdir(parents=True)
    (tmp_path / "site/torch/__init__.py").touch()
    shutil.copytree(
        ROOT / "multigpu", tmp_path / "multigpu", ignore=shutil.ignore_patterns("__pycache__")
    )
    bare = environment(tmp_path / "bare")
    real = os.path.realpath(shutil.which("python3", path="/usr/bin:/bin") or "")
    if not real or subprocess.run([real, "-P", "-c", ""], capture_output=True).returncode:
        pytest.skip("needs a python3 ≥ 3.11 of the system")
    (bare / "bin/python").write_text(
        f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {real} "$@"\n'
    )
    assert activate(tmp_path, path=bare)[0] == 1


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}, 2),
        ({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_GPUS_ON_NODE": "2"}, 0),
        # the shell of salloc, on the login node
        ({"SLURM_JOB_ID": "7"}, 0),
    ],
    ids=["no GPU", "2 GPUs", "salloc"],
)
def test_activate_refuses_a_job_without_gpus(tmp_path: Path, variables: dict, code: int):
    active = environment(tmp_path / "active")
    found, text = activate(tmp_path, path=active, **variables)
    assert found == code
    assert code == 0 or ("no GPU" in text and "--gpus-per-node" in text and "\n" not in text)
