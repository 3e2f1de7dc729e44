"""What the runner must know of a script: where it is, how it starts, how its losses look."""

from dataclasses import dataclass, field
from pathlib import Path

# A number as scripts print losses; "nan" and "inf" are no number that proves anything.
NUMBER = r"(-?\d+\.\d+(?:e[+-]?\d+)?)"
# In a translated script: the call that follows draws on the GPU.
ON_GPU = '__import__("as_gpus").on_gpu'
# How many scripts print their losses: "Loss: 0.1"; "Loss 0.1 (0.2)", with the mean.
LOSS = rf"[Ll]oss:? {NUMBER}"
METER = rf"Loss {NUMBER} \({NUMBER}\)"
TWO_RANKS = "torchrun --standalone --nproc_per_node=2"
FOUR_RANKS = "torchrun --standalone --nproc_per_node=4"
CIFAR = {"data/cifar-10-batches-py": "cifar-10-batches-py"}


@dataclass(frozen=True)
class Case:
    """A public CUDA script.

    name      the row's name
    checkout  the folder below checkouts/ with the repository's files
    folder    the folder below the checkout in which the script runs
    command   what follows `multigpu virtual --gpus N`
    gpus      N
    options   more options of `multigpu virtual`
    smaller   for each file, pairs (literal, smaller literal)
    changed   for each file, pairs (text, text): what torch or NumPy have since removed, and
              imports of kernels for real GPUs alone; nothing else is changed
    data      for each path that the script reads, relative to its folder, the stand-in data
    losses    a pattern whose groups are the losses that the script prints
    scalars   the TensorBoard file that the script writes, as a glob: its losses are compared
    weights   the checkpoint that the script writes, as a glob: its tensors are compared
    reference   what the losses are compared with: "CPU" or "vgpu", see translate.py
    reference_command  the reference's command, if it is another one
    translated  for each file, pairs (pattern, text): what translate.py cannot know
    unproven    why there is no reference
    seeded    whether the script seeds itself; otherwise the runner seeds both runs
    python_path  a folder, relative to the script's, from which it imports
    copied    the folder below the checkout that is copied, if the script needs more than
              its own
    packages  packages that the script wants in these versions, as pip writes them
    """

    name: str
    checkout: str
    folder: str
    command: str
    gpus: int = 2
    options: str = ""
    smaller: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    changed: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    losses: str = ""
    scalars: str = ""
    weights: str = ""
    reference: str = "CPU"
    reference_command: str = ""
    translated: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    unproven: str = ""
    seeded: bool = True
    python_path: str = ""
    copied: str = ""
    packages: str = ""

    @property
    def script(self) -> str:
        """The script's path below the checkout."""
        names = [word for word in self.command.split() if word.endswith(".py")]
        return str(Path(self.folder, next(name for name in names if "{" not in name)))


def replace_texts(folder: Path, texts: dict[str, list[tuple[str, str]]]) -> None:
    """Replace texts in the files of `folder`: Case.smaller, or Case.changed.

    Raises ValueError if a text is not there.
    """
    for name, pairs in texts.items():
        text = (folder / name).read_text()
        for old, new in pairs:
            if old not in text:
                raise ValueError(f"{name} has no {old!r}: take the commit in the README.")
            text = text.replace(old, new)
        (folder / name).write_text(text)
