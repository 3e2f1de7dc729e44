"""Prove a lesson's script with two ranks, as it is or with a fault."""

from pathlib import Path

from multigpu import prove


def proof(
    script: Path,
    folder: Path,
    *flags: object,
    right: str = "",
    wrong: str = "",
    steps: int = 3,
) -> prove.Proof:
    """Prove a copy of the script in `folder`, in which `wrong` replaces `right`."""
    text = script.read_text()
    assert right in text
    path = folder / "proved.py"
    path.write_text(text.replace(right, wrong, 1))
    launcher = ["torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    return prove.run([*launcher, str(path), *map(str, flags)], steps=steps, timeout=100)
