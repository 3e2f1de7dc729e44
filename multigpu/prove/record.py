"""What a process leaves of its training: a Head for each optimizer, and a Step for each step.

A process appends pickles to its own file, RANK-PID.record; one that is killed leaves the steps
that it has made.
"""

import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

SUFFIX = ".record"
# In the folder: made to ask all processes where they wait; what they answer.
ASK_WHERE = "where"
WHERE_SUFFIX = ".waits"
# Made by a rank that has made its last step, that has reached its program's end, and that an
# exception has ended. The last two are JSON: time, rank, steps, the error and its traceback.
DONE_PREFIX = "done-"
ENDED_PREFIX = "ended-"
FAILED_PREFIX = "failed-"
# Types whose eps is larger have 16 bit or fewer.
COARSE = 2.0**-20
# In Step.gathered: calls in the forward of an autograd.Function.
IN_FUNCTION = "in a Function"


@dataclass
class Part:
    """A parameter, or the part of it that a rank holds.

    name     its name in the module, without what DDP, FSDP and torch.compile prefix
    shape    the shape of the whole parameter
    shard    which elements the rank holds: None for all, else a key that is equal in ranks
             that hold the same ones
    numel    the number of elements that the rank holds
    eps      the distance from 1 to the next number of its dtype
    in_ddp   whether a module that DDP wraps has it
    hooked   whether the program has registered a hook of its gradient
    in_module  whether a module that the program called has it; else it is the optimizer's
               own, as in ZeRO by hand
    """

    name: str
    shape: tuple[int, ...]
    shard: tuple | None
    numel: int
    eps: float
    in_ddp: bool = False
    hooked: bool = False
    in_module: bool = True


@dataclass
class Loader:
    """A DataLoader that gave a batch.

    sampler  the type of its sampler
    rows     the length of its data set; None if it has none
    batches  its length; None if it has none
    seed, set_epoch  those of a DistributedSampler
    """

    sampler: str
    shuffle: bool
    rows: int | None
    batches: int | None
    seed: int = 0
    set_epoch: int = 0


@dataclass
class Head:
    """What is known of an optimizer and its program at the optimizer's first step.

    optimizer   the place of the optimizer in the order of first steps
    world       the number of ranks
    peers       the ranks with which this one shares its data-parallel work, by DDP's groups
                and FSDP's meshes; None if the program uses neither
    seeded      whether the program has called torch.manual_seed
    frozen      the parameters of modules that the program has called, which need no gradient
    norms       the modules that normalize over a rank's own batch: BatchNorm
    hooks       the communication hooks of DDP
    gpus        the number of GPUs that the process has used
    coarse      the distance from 1 to the next number of the type in which gradients travel
                between ranks, where a hook or FSDP's reduce_dtype sets one; else 0
    """

    optimizer: int
    kind: str
    rank: int
    world: int
    parts: list[Part]
    buffers: list[str]
    frozen: list[str]
    peers: tuple[int, ...] | None
    seeded: bool
    norms: list[str]
    hooks: list[str]
    coarse: float
    uses_ddp: bool
    gpus: int


@dataclass
class Step:
    """One step of an optimizer, in sketches (parameters, 64), as sketch.py makes them.

    weights, gradients, after   before the step, at the step, and after it
    buffers, frozen   as many rows as Head has names
    moments      of each buffer the sums of its elements, their squares and cubes, (buffers, 3)
    present      which parameters have a gradient
    placed       of a gradient that is not divided over the ranks as its parameter is: the
                 parameter's place, and the key of the elements that the rank holds, as in Part
    partial      of a gradient that is the sum of what several ranks hold (DTensor's Partial):
                 the parameter's place and these ranks
    options      those of each group: lr, weight_decay, …
    rows         for each batch that the outermost module got, a number for each row
    widths       the numbers of elements that these batches' rows have
    outputs      as many arrays: a number for each row of what the module returned, or empty
    losses       the scalars that went backward, divided by the loss scale
    loss_eps     the distance from 1 to the next number of the last one's type
    made         how the last of them was made: names of autograd's nodes, with "mean" or "sum"
    norms        (norm, limit) of each clip_grad_norm_
    forward_sync, backward_sync   DDP's require_backward_grad_sync, at each forward, backward
    gathered     before backward, calls of dist.all_gather… and all_reduce with a tensor that
                 needs a gradient; below IN_FUNCTION those in a Function of the program
    random       the modules that draw random numbers, or "forward"
    reduces      whether the optimizer itself reduces over the ranks: in its step, or into
                 other tensors in hooks of the gradients
    skipped      the steps that a gradient scaler has skipped before this one
    epoch        how many times the loader's iteration has begun; 0 without a DataLoader
    local        the gradients before synchronization, added over micro-batches
    """

    optimizer: int
    number: int
    weights: np.ndarray
    gradients: np.ndarray
    present: np.ndarray
    options: list[dict]
    buffers: np.ndarray
    frozen: np.ndarray
    placed: dict[int, tuple | None] = field(default_factory=dict)
    partial: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rows: list[np.ndarray] = field(default_factory=list)
    widths: set[int] = field(default_factory=set)
    outputs: list[np.ndarray] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    loss_eps: float = 0.0
    made: list[str] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    forward_sync: list[bool] = field(default_factory=list)
    backward_sync: list[bool] = field(default_factory=list)
    gathered: dict[str, int] = field(default_factory=dict)
    random: list[str] = field(default_factory=list)
    reduces: bool = False
    skipped: int = 0
    epoch: int = 0
    loader: Loader | None = None
    moments: np.ndarray | None = None
    after: np.ndarray | None = None
    local: np.ndarray | None = None


@dataclass
class RankRecord:
    """All that one process has recorded."""

    rank: int
    heads: dict[int, Head]
    steps: list[Step]


def append(path: Path, entry: Head | Step) -> None:
    """Append an entry to a record."""
    with open(path, "ab") as file:
        pickle.dump(entry, file, protocol=pickle.HIGHEST_PROTOCOL)


def read(folder: Path) -> list[RankRecord]:
    """The records of all processes that have made a step, in the order of their ranks."""
    records = []
    for path in folder.glob(f"*{SUFFIX}"):
        entries = list(_entries(path))
        heads = {entry.optimizer: entry for entry in entries if isinstance(entry, Head)}
        steps = [entry for entry in entries if isinstance(entry, Step)]
        if steps:
            rank = next(iter(heads.values())).rank
            records.append(RankRecord(rank, heads, steps))
    return sorted(records, key=lambda record: record.rank)


def _entries(path: Path) -> Iterator[Head | Step]:
    with open(path, "rb") as file, suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(file)
