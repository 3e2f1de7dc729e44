"""The command `multigpu`: doctor, slurm, memory, scaling, virtual, prove, notebooks, …

Each command calls one module and prints what it returns.
"""

import json
import re
import sys
import time
from importlib import metadata
from typing import Annotated, Any, NoReturn

import typer

from multigpu import __version__, classroom
from multigpu.cli import exercises, memory, prove, scaling, virtual
from multigpu.course import find_root
from multigpu.errors import UserError
from multigpu.launch.terminal import announce
from multigpu.virtual import after_torch

# typer's class, or click's: typer brings its own click, or needs the other one.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
app = typer.Typer(no_args_is_help=True, add_completion=False)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def multigpu(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """The course on training with many GPUs, and its tools."""


# ---- multigpu slurm: a real Slurm on this machine -------------------------------------------

slurm = typer.Typer(
    no_args_is_help=True, help="A real Slurm cluster on this machine, to practise on."
)
app.add_typer(slurm, name="slurm")


@slurm.command("up")
def slurm_up(
    nodes: Annotated[int, typer.Option(help="Number of simulated nodes.")] = 2,
    gpus_per_node: Annotated[
        int, typer.Option(help="Number of simulated GPUs on each node.")
    ] = 2,
) -> None:
    """Start the cluster; do nothing if it is up."""
    print(classroom.up(nodes, gpus_per_node))


@slurm.command("down")
def slurm_down() -> None:
    """Cancel all jobs, end the daemons and remove the cluster's files, if it is up."""
    print(classroom.down())


@slurm.command("status")
def slurm_status() -> None:
    """Print what runs and what to do next; exit code 1 unless the whole cluster runs."""
    running, text = classroom.status()
    print(text)
    if not running:
        raise SystemExit(1)


@slurm.command("kill")
def slurm_kill(node: Annotated[str, typer.Argument(help="The node, as in n2.")]) -> None:
    """End a node as a power cut does, with all processes of its jobs."""
    print(classroom.kill(node))


@slurm.command("repair")
def slurm_repair(node: Annotated[str, typer.Argument(help="The node, as in n2.")]) -> None:
    """Start a node again that `kill` has ended."""
    print(classroom.repair(node))


@slurm.command("env")
def slurm_env() -> None:
    """Print the line that an ordinary user's shell needs: eval "$(multigpu slurm env)"."""
    print(classroom.env())


@slurm.command("install")
def slurm_install(
    with_mpi: Annotated[
        bool, typer.Option("--with-mpi", help="Install Open MPI too, for mpirun.")
    ] = False,
    with_bubblewrap: Annotated[
        bool, typer.Option("--with-bubblewrap", help="Install bubblewrap too, for grading.")
    ] = False,
) -> None:
    """Install Slurm with apt-get, as root on Debian or Ubuntu; otherwise say what to run."""
    print(classroom.install(with_mpi, with_bubblewrap))


# ---- multigpu doctor: what this machine can run ---------------------------------------------


@app.command("doctor")
def doctor_command(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with fixed keys.")
    ] = False,
) -> None:
    """Print what this machine can run, and what to do about the rest.

    The exit code is 1 if the lessons cannot run.
    """
    from multigpu.cli import doctor

    announce("examining this machine, which takes some seconds")
    checks = doctor.examine()
    if as_json:
        print(json.dumps(doctor.as_dict(checks), indent=2))
    else:
        from rich.console import Console

        Console(highlight=False).print(doctor.as_table(checks))
    if not doctor.works(checks):
        raise SystemExit(1)


# ---- multigpu horovodrun: ranks with Horovod's variables ------------------------------------


@app.command(
    "horovodrun",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
def horovodrun_command(
    arguments: Annotated[list[str], typer.Argument(metavar="-np N COMMAND...")],
) -> None:
    """Start N ranks of a command on this machine, as Horovod's horovodrun does."""
    from multigpu.launch import horovodrun

    raise SystemExit(horovodrun.run(arguments))


# ---- multigpu notebooks: each notebook matches its source -----------------------------------

notebooks = typer.Typer(
    no_args_is_help=True,
    help="Make the notebooks from their sources, and check that they match.",
)
app.add_typer(notebooks, name="notebooks")
Stems = Annotated[
    list[str] | None,
    typer.Argument(metavar="[STEM]...", help="As in scripts/STEM.py; default: all."),
]


@notebooks.command("run")
def notebooks_run(stems: Stems = None) -> None:
    """Execute sources and write their notebooks; exit code 1 if a cell fails.

    A source is lessons/NN-slug/STEM.md. A notebook with a failed cell is left unchanged.
    """
    from multigpu import notebooks as pairs

    root = find_root()
    failed = False
    for stem in pairs.select(stems or (), root):
        print(f"{stem}: running", flush=True)
        started = time.perf_counter()
        try:
            remarks = pairs.run(stem, root)
        except pairs.CellFailed as error:
            failed = True
            print(error, file=sys.stderr)
            continue
        seconds = time.perf_counter() - started
        print(f"{stem}: notebooks/{stem}.ipynb written after {seconds:.0f} s")
        for remark in remarks:
            print(f"{stem}: {remark}")
    if failed:
        raise SystemExit(1)


@notebooks.command("text")
def notebooks_text(stems: Stems = None) -> None:
    """Take over the prose of sources in their notebooks, without running them.

    The notebooks keep their outputs. A source whose code has changed must be run.
    """
    from multigpu import notebooks as pairs

    root = find_root()
    problems = []
    for stem in pairs.select(stems or (), root):
        try:
            if pairs.update_text(stem, root):
                print(f"notebooks/{stem}.ipynb: text updated")
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))


@notebooks.command("copy")
def notebooks_copy(stems: Stems = None) -> None:
    """Write your own notebooks to my-copy/, without outputs and guesses.

    A notebook that exists there is kept.
    """
    from multigpu.notebooks import copies

    for sentence in copies.copy(stems or ()):
        print(sentence)


@notebooks.command("claims")
def notebooks_claims() -> None:
    """Write lessons/claims.md from the claims in the notebooks' stored outputs."""
    from multigpu.notebooks import claims

    print(f"{claims.PAGE}: {'updated' if claims.write() else 'unchanged'}")


@notebooks.command("footers")
def notebooks_footers() -> None:
    """Write the footers of pages and notebooks, and the tables of lessons."""
    from multigpu.notebooks import footers

    for name in footers.write():
        print(f"{name}: updated")


@notebooks.command("check")
def notebooks_check(stems: Stems = None) -> None:
    """Report notebooks that no longer match their sources; exit code 1 if there are any.

    It also reports cells that failed, were not executed, or were executed out of order,
    outputs that are not those of the run, and a page of claims that is not made from them.
    """
    from multigpu import notebooks as pairs
    from multigpu.notebooks import claims

    findings = pairs.check(stems or ()) + claims.check()
    for finding in findings:
        print(finding)
    if findings:
        raise SystemExit(1)
    print("every notebook matches its source, and every cell was executed")


# ---- multigpu memory: see memory.py ---------------------------------------------------------

app.command("memory")(memory.memory)


# ---- multigpu scaling: see scaling.py -------------------------------------------------------

app.command("scaling")(scaling.scaling)


# ---- multigpu virtual: see virtual.py -------------------------------------------------------

app.command(
    "virtual",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(virtual.virtual)


# ---- multigpu prove: see prove.py -----------------------------------------------------------

app.command(
    "prove",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(prove.prove)


# ---- multigpu exercise, release, grade: see exercises.py ------------------------------------

app.add_typer(exercises.exercise, name="exercise")
app.command("release")(exercises.release)
app.command("grade")(exercises.grade)


def main() -> None:
    """Run the command line; a UserError is printed as one sentence, with exit code 2.

    So are a wrong option, and a missing package that one of the extras in pyproject.toml
    installs.
    """
    after_torch.call(lambda: None)  # a command that imports torch ends sooner
    try:
        raise SystemExit(app(standalone_mode=False))
    except UserError as error:
        _fail(str(error))
    except USAGE_ERROR as error:
        if type(error).__name__ != "NoArgsIsHelpError":
            _fail(_in_a_sentence(error))
        error.show()
        raise SystemExit(2) from None
    except ModuleNotFoundError as error:
        extra = _extra_with(error.name or "")
        if extra is None:
            raise
        _fail(
            f"this command needs the package {error.name}: run pip install "
            f"'multigpu[{extra}]', or make install in a clone."
        )


def _fail(sentence: str) -> NoReturn:
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _in_a_sentence(error: Any) -> str:
    """What is wrong with an option, and what to give."""
    flag = next(iter(getattr(getattr(error, "param", None), "opts", ())), "")
    if flag.startswith("--") and (kind := re.search("integer|number|float", error.message)):
        value = re.search(f"{flag}[=\0]([^\0]*)", "\0".join(sys.argv))[1]
        expected = "a whole number" if kind[0] == "integer" else "a number"
        return f"{flag} is {value!r}: give {expected}, such as 2."
    text = error.format_message().rstrip(".")
    hint = f": see `{error.ctx.command_path} --help`" if error.ctx else ""
    return f"{text[0].lower()}{text[1:]}{hint}."


def _extra_with(package: str) -> str | None:
    """The extra of this distribution that installs a package, or None."""
    for requirement in metadata.requires("multigpu") or ():
        extra = re.search(r"extra == ['\"]([\w-]+)", requirement)
        if extra and re.match(rf"{re.escape(package)}\b", requirement):
            return extra[1]
    return None
