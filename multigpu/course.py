"""Where the course's files are."""

from pathlib import Path

from multigpu.errors import UserError


def find_root() -> Path:
    """The course's folder: the working directory, one above it, or this package's parent.

    Raises UserError if none of them has scripts/ and pyproject.toml.
    """
    current = Path.cwd()
    for folder in (current, *current.parents, Path(__file__).resolve().parent.parent):
        if (folder / "scripts").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    raise UserError(
        f"{current} is not in the course's folder, which has scripts/ and notebooks/: "
        f"change to it first."
    )
