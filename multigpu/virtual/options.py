"""What `multigpu virtual` simulates; an environment variable carries it to all processes."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from multigpu.errors import UserError, did_you_mean
from multigpu.virtual import gpu_file
from multigpu.virtual.faults import Kill, Slow
from multigpu.virtual.sim.network import Network
from multigpu.virtual.sim.presets import (
    GPUS,
    LINKS,
    NETWORKS,
    Gpu,
    Link,
    Shares,
    find_gpus,
    find_preset,
    models_label,
    size_in_bytes,
)

# The environment variable with the options of the run, as JSON.
VARIABLE = "MULTIGPU_VIRTUAL"
# The path of the file that joins the processes of several ranks of a world.
JOINING = "MULTIGPU_VIRTUAL_JOINING"
MOST_GPUS = 128
CLOCKS = ("real", "simulated")


@dataclass(frozen=True)
class Options:
    """The virtual GPUs of a run.

    gpus           how many GPUs a program sees: cuda:0, cuda:1, …
    gpu            the GPU's name, one of GPUS, or a Gpu; or one for each of the GPUs
    link           the link inside a node, one of LINKS, or a Link
    gpus_per_node  the number of GPUs of a node; None: all GPUs are on one node
    between_nodes  the link between nodes, one of NETWORKS, or a Link; None: one node
    memory         each GPU's capacity in bytes; None: that of its model
    shapes_only    whether tensors have shapes but no numbers
    clock          which clock the program's own timing reads: "real" or "simulated"
    world          the number of ranks of which this machine runs only `ranks`; None: the
                   program's processes are all ranks. Then `gpus` are those of one node
    ranks          the ranks of the world that run, each in a process of its own
    steps          the optimizer's steps after which the program ends; None: it ends by itself
    samples_per_step, tokens_per_step   of one step of all ranks together; None: not known
    peaks          whether kernels reach the data sheet's peaks, and not the preset's shares
    alias          whether cuda:1, cuda:2, … are further names of cuda:0, the only GPU: a
                   program with layers on several GPUs then runs on one
    history        whether the record has each allocation, for the memory over time
    kill_rank, slow_rank   faults on purpose, "1@20" and "2:1.5" (faults.py); None: no fault
    timeout        seconds without a move after which a run that stands still is ended
    """

    gpus: int = 2
    gpu: str | Gpu | tuple[str | Gpu, ...] = "V100-16GB"
    link: str | Link = "NVLink2"
    gpus_per_node: int | None = None
    between_nodes: str | Link | None = None
    memory: int | None = None
    shapes_only: bool = False
    clock: Literal["real", "simulated"] = "real"
    world: int | None = None
    ranks: tuple[int, ...] = (0,)
    steps: int | None = None
    samples_per_step: int | None = None
    tokens_per_step: int | None = None
    peaks: bool = False
    alias: bool = False
    timeout: float = 60.0
    history: bool = False
    kill_rank: str | None = None
    slow_rank: str | None = None

    def label(self) -> str:
        """The label of all simulated times: "simulated: 2 × V100-16GB, NVLink2"."""
        models = self.models()
        if self.world is None:
            return f"simulated: {models_label(models)}, {self.network().label()}"
        which = "rank" if len(self.ranks) == 1 else "ranks"
        numbers = ", ".join(f"{rank:,}" for rank in self.ranks)
        return (
            f"simulated: {which} {numbers} of {self.world:,} × {models[0].name}, "
            f"{self.network().label()}"
        )

    def measures_steps(self) -> bool:
        """Whether the report has the figures of an optimizer's step."""
        wishes = (self.world, self.steps, self.samples_per_step, self.tokens_per_step)
        return any(wish is not None for wish in wishes)

    def models(self) -> list[Gpu]:
        """The model of each GPU."""
        models = find_gpus(self.gpu, self.gpus)
        return [replace(gpu, shares=None) for gpu in models] if self.peaks else models

    def seen(self, visible: Sequence[int]) -> "Options":
        """The options of a process that sees the GPUs with the numbers `visible` alone."""
        models = find_gpus(self.gpu, self.gpus)
        gpu = self.gpu
        if isinstance(gpu, tuple):
            gpu = tuple(models[number] for number in visible)
        return replace(self, gpus=len(visible), gpu=gpu)

    def network(self) -> Network:
        """How the GPUs are joined."""
        between = self.between_nodes and find_preset(self.between_nodes, NETWORKS)
        return Network(find_preset(self.link, LINKS), between, self.gpus_per_node)

    def to_json(self) -> str:
        """The options as the text of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Options":
        """The options of a text that `to_json` has made."""
        values = json.loads(text)
        gpu = values["gpu"]
        gpu = tuple(map(_gpu_of, gpu)) if isinstance(gpu, list) else _gpu_of(gpu)
        return cls(**values | {"ranks": tuple(values["ranks"]), "gpu": gpu})


def _gpu_of(value: str | dict) -> str | Gpu:
    """A GPU of the options' JSON: a name, or a Gpu's fields."""
    if isinstance(value, str):
        return value
    shares = value["shares"] and Shares(**value["shares"])
    return Gpu(**value | {"shares": shares, "capability": tuple(value["capability"])})


def from_environment(environ: Mapping[str, str] = os.environ) -> Options | None:
    """The options of the run to which this process belongs; None outside of such a run."""
    text = environ.get(VARIABLE)
    return Options.from_json(text) if text else None


def check(options: Options) -> None:
    """Raise UserError, naming the flag, for options that cannot be simulated."""
    for flag in ("steps", "samples_per_step", "tokens_per_step"):
        number = getattr(options, flag)
        if number is not None and number < 1:
            name = flag.replace("_", "-")
            raise UserError(f"--{name} is {number}: give a number from 1 up.")
    per_node = options.gpus_per_node
    if per_node is not None and per_node < 1:
        raise UserError(f"--gpus-per-node is {per_node}: give a number from 1 up.")
    if options.world is not None:
        _check_world(options)
    if not 1 <= options.gpus <= MOST_GPUS:
        raise UserError(f"--gpus is {options.gpus}: give a number from 1 to {MOST_GPUS}.")
    if isinstance(options.gpu, tuple):
        named = len(options.gpu)
        if options.world is not None:
            raise UserError("with --world all GPUs are equal: give --gpu one name.")
        if named != options.gpus:
            raise UserError(
                f"--gpu names {named} GPUs, but --gpus is {options.gpus}: give one name for "
                f"all of them, or {options.gpus} names."
            )
    _check_name("--link", options.link, LINKS)
    if options.between_nodes is not None:
        _check_name("--between-nodes", options.between_nodes, NETWORKS)
    if options.kill_rank is not None:
        Kill.parse(options.kill_rank)
    if options.slow_rank is not None:
        Slow.parse(options.slow_rank)
    if not options.timeout > 0:
        raise UserError(
            f"--timeout is {options.timeout:g}: give seconds, more than 0, after which a run "
            f"that stands still is ended."
        )
    if options.clock not in CLOCKS:
        raise UserError(f"--clock is {options.clock!r}: give real or simulated.")
    if (per_node is None) != (options.between_nodes is None):
        raise UserError(
            "--gpus-per-node and --between-nodes belong together: give both, or neither."
        )
    if per_node and options.gpus % per_node and per_node % options.gpus:
        raise UserError(
            f"--gpus {options.gpus} cannot be divided into nodes of {per_node}: give a "
            f"--gpus-per-node that divides it, or that is a multiple of it."
        )


def _check_world(options: Options) -> None:
    """The checks of `check` for --world, --as-rank and --gpus-per-node."""
    size, per_node = options.world, options.gpus_per_node
    if size < 1:
        raise UserError(f"--world is {size}: give the number of ranks, from 1 up.")
    if per_node is None and size > MOST_GPUS:
        raise UserError(
            f"--world {size} does not fit on one node: give --gpus-per-node and "
            f"--between-nodes."
        )
    if per_node is not None and size % per_node and size > per_node:
        raise UserError(
            f"--world {size} cannot be divided into nodes of {per_node}: give a "
            f"--gpus-per-node that divides it."
        )
    for rank in options.ranks:
        if not 0 <= rank < size:
            raise UserError(
                f"--as-rank is {rank}: the ranks of --world {size} are 0 to {size - 1}."
            )
    if len(set(options.ranks)) < len(options.ranks):
        raise UserError("--as-rank names a rank twice: give each rank once.")


def ranks_of(texts: Sequence[str]) -> tuple[int, ...]:
    """The ranks of `--as-rank 0,8 --as-rank 16`. Raises UserError for what is no number."""
    words = [word.strip() for text in texts for word in text.split(",")]
    for word in words:
        if not word.isdecimal():
            raise UserError(f"--as-rank is {word!r}: give ranks, such as 0 or 0,8,16.")
    return tuple(int(word) for word in words)


def _check_name(flag: str, name: str, table: Mapping[str, object], hint: str = "") -> None:
    if name not in table:
        hint = did_you_mean(name, table) or hint or f"use one of {', '.join(table)}."
        raise UserError(f"{flag} is {name!r}: {hint}")


def gpus_of(text: str) -> str | Gpu | tuple[str | Gpu, ...]:
    """The GPUs of `--gpu`: a name, the file of one's own GPU, or several of both.

    Raises UserError for a name that is not known, and for a file that is not right.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not gpu_file.is_file(word):
            hint = f"use one of {', '.join(GPUS)}, or a file (.json or .toml) with your own."
            _check_name("--gpu", word, GPUS, hint)
    gpus = tuple(gpu_file.read(word) if gpu_file.is_file(word) else word for word in words)
    return gpus[0] if len(gpus) == 1 else gpus


def memory_in_bytes(text: str) -> int:
    """The bytes of `--memory`: "64MiB" gives 2**26. Raises UserError for anything else."""
    try:
        return size_in_bytes(int(text) if text.isdecimal() else text)
    except UserError:
        raise UserError(
            f"--memory is {text!r}: give bytes, or a size such as 64MiB or 1.5GiB."
        ) from None
