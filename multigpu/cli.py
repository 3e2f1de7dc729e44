"""The command `multigpu`: doctor, slurm, notebooks. Each command calls one module and prints what it returns."""

import sys

import typer

from multigpu.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The course on training with many GPUs.")


def main() -> None:
    """Run the command line; a user's mistake is one sentence on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
