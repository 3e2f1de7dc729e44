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
    gpus: int | None = None,
) -> prove.Proof:
    """Prove a copy of the script in `folder`, in which `wrong` replaces `right`.

    By default on CPU processes, else on `gpus` virtual GPUs.
    """
    text = script.read_text()
    assert right in text
    path = folder / "proved.py"
    path.write_text(text.replace(right, wrong, 1))
    launcher = ["torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    command = [*launcher, str(path), *map(str, flags)]
    return prove.run(command, gpus=gpus, steps=steps, timeout=100)
