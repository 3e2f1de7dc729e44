"""Does activate.sh find the environment, wherever a cluster keeps it?

An environment is a folder whose bin/python says whether it has torch and multigpu, as the real one does.
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
    """Source activate.sh in a bare shell: the exit code, and which environment it took, or its complaint."""
    (root / "slurm").mkdir(exist_ok=True)
    shutil.copy(ROOT / "slurm/activate.sh", root / "slurm")
    search = (
        f"{path}/bin:/usr/bin:/bin"
        if path
        else f"{environment(root / 'none', works=False)}/bin:/usr/bin:/bin"
    )
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", f"{shell}\nsource slurm/activate.sh || exit\necho went on"],
        env={"PATH": search, "HOME": str(root), **variables}, cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode == 0) == ("went on" in done.stdout) == (not done.stderr), done
    return done.returncode, done.stderr.strip() or done.stdout.splitlines()[0].removeprefix(
        "environment: "
    )


def fake_conda(*environments: Path) -> str:
    cases = "".join(
        f'{folder.name}|{folder}) export PATH="{folder}/bin:$PATH";; '
        for folder in environments
    )
    return f'conda() {{ [ "$1" = activate ] || return 1; case "$2" in {cases} *) echo no such >&2; return 1;; esac; }}'


def test_activate_takes_what_is_active(tmp_path: Path):
    active = environment(tmp_path / "active")
    environment(tmp_path / ".venv")
    assert activate(tmp_path, path=active) == (0, f"{active}/bin/python")


def test_activate_takes_the_repositorys_venv(tmp_path: Path):
    environment(tmp_path / ".venv")
    conda = fake_conda(environment(tmp_path / "multigpu"))
    assert activate(tmp_path, conda) == (0, f"{tmp_path}/.venv/bin/python")


def test_activate_takes_the_conda_environment(tmp_path: Path):
    environment(tmp_path / ".venv", works=False)
    conda = fake_conda(environment(tmp_path / "multigpu"))
    assert activate(tmp_path, conda) == (0, f"{tmp_path}/multigpu/bin/python")


def test_activate_asks_the_conda_program_where_the_function_is_missing(tmp_path: Path):
    made = environment(tmp_path / "multigpu")
    program = tmp_path / "conda-program"
    program.write_text(
        f"#!/bin/sh\n[ \"$1 $2\" = 'shell.bash hook' ] && cat <<'END'\n{fake_conda(made)}\nEND\n"
    )
    program.chmod(0o755)
    assert activate(tmp_path, CONDA_EXE=str(program)) == (0, f"{made}/bin/python")


def test_activate_obeys_course_env(tmp_path: Path):
    active, mine = environment(tmp_path / "active"), environment(tmp_path / "mine")
    assert activate(tmp_path, path=active, COURSE_ENV=str(mine)) == (0, f"{mine}/bin/python")
    assert activate(tmp_path, fake_conda(mine), path=active, COURSE_ENV="mine") == (
        0,
        f"{mine}/bin/python",
    )


def test_activate_refuses_a_course_env_that_does_not_work(tmp_path: Path):
    active, broken = (
        environment(tmp_path / "active"),
        environment(tmp_path / "broken", works=False),
    )
    code, said = activate(tmp_path, path=active, COURSE_ENV=str(broken))
    assert code == 1 and "lacks torch or multigpu" in said and "\n" not in said
    code, said = activate(tmp_path, path=active, COURSE_ENV="/nowhere")
    assert code == 1 and "COURSE_ENV is '/nowhere', neither" in said and "\n" not in said


def test_activate_loads_modules_first(tmp_path: Path):
    loaded = environment(tmp_path / "loaded")
    module = f'module() {{ [ "$*" = "load python/3.11 cuda" ] && export PATH="{loaded}/bin:$PATH"; }}'
    assert activate(tmp_path, module, COURSE_MODULES="python/3.11 cuda") == (
        0,
        f"{loaded}/bin/python",
    )
    shutil.rmtree(tmp_path / "none")
    code, said = activate(tmp_path, module, COURSE_MODULES="python/2.7")
    assert code == 1 and "does not load it" in said and "\n" not in said
    shutil.rmtree(tmp_path / "none")
    assert activate(tmp_path, COURSE_MODULES="python/3.11")[0] == 1  # a site without modules


def test_activate_where_there_is_nothing(tmp_path: Path):
    code, said = activate(tmp_path)
    assert (
        code == 1
        and said.startswith("error: no Python environment with torch and multigpu")
        and "\n" not in said
    )


def test_activate_is_not_fooled_by_the_current_directory(tmp_path: Path):
    """A python that finds multigpu only because the shell stands in the repository would not find it in a script."""
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
