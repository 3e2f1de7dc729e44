"""The command `multigpu`: doctor, slurm, notebooks. Each command calls one module and prints what it returns."""

import sys
from typing import Annotated

import typer

from multigpu import classroom
from multigpu.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The course on training with many GPUs.")


# ---- multigpu slurm: a real Slurm on this machine ----------------------------------------------------------------

slurm = typer.Typer(no_args_is_help=True, help="A real Slurm cluster on this machine, to practise on.")
app.add_typer(slurm, name="slurm")


@slurm.command("up")
def slurm_up(
    nodes: Annotated[int, typer.Option(help="How many nodes to pretend.")] = 2,
    gpus_per_node: Annotated[int, typer.Option(help="How many GPUs each of them pretends to have.")] = 2,
) -> None:
    """Start the cluster; does nothing where it is up already."""
    print(classroom.up(nodes, gpus_per_node))


@slurm.command("down")
def slurm_down() -> None:
    """Cancel its jobs, end its daemons and remove its files; does nothing where it is down already."""
    print(classroom.down())


@slurm.command("status")
def slurm_status() -> None:
    """Say what runs and what to do about what does not; exit code 1 where the cluster is not up."""
    running, text = classroom.status()
    print(text)
    if not running:
        raise SystemExit(1)


@slurm.command("env")
def slurm_env() -> None:
    """Print the line an ordinary user's shell needs: eval "$(multigpu slurm env)"."""
    print(classroom.env())


@slurm.command("install")
def slurm_install(
    with_mpi: Annotated[bool, typer.Option("--with-mpi", help="Open MPI too, for mpirun.")] = False,
) -> None:
    """Install Slurm with apt-get, as root on Debian or Ubuntu; say the command elsewhere."""
    print(classroom.install(with_mpi))


def main() -> None:
    """Run the command line; a user's mistake is one sentence on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
