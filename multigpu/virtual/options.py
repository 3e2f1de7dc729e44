"""What `multigpu virtual` simulates; an environment variable carries it to all processes."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from multigpu.errors import UserError, did_you_mean
from multigpu.vgpu.sim.network import Network
from multigpu.vgpu.sim.presets import GPUS, LINKS, NETWORKS, size_in_bytes

# The environment variable with the options of the run, as JSON.
VARIABLE = "MULTIGPU_VIRTUAL"
MOST_GPUS = 128
CLOCKS = ("real", "simulated")


@dataclass(frozen=True)
class Options:
    """The virtual GPUs of a run.

    gpus           how many GPUs a program sees: cuda:0, cuda:1, …
    gpu            the GPU's name, one of GPUS
    link           the link inside a node, one of LINKS
    gpus_per_node  the number of GPUs of a node; None: all GPUs are on one node
    between_nodes  the link between nodes, one of NETWORKS; None if there is one node
    memory         each GPU's capacity in bytes; None: that of `gpu`
    shapes_only    whether tensors have shapes but no numbers
    clock          which clock the program's own timing reads: "real" or "simulated"
    """

    gpus: int = 2
    gpu: str = "V100-16GB"
    link: str = "NVLink2"
    gpus_per_node: int | None = None
    between_nodes: str | None = None
    memory: int | None = None
    shapes_only: bool = False
    clock: Literal["real", "simulated"] = "real"

    def label(self) -> str:
        """The label of all simulated times: "simulated: 2 × V100-16GB, NVLink2"."""
        return f"simulated: {self.gpus} × {self.gpu}, {self.network().label()}"

    def network(self) -> Network:
        """How the GPUs are joined."""
        between = self.between_nodes and NETWORKS[self.between_nodes]
        return Network(LINKS[self.link], between, self.gpus_per_node)

    def to_json(self) -> str:
        """The options as the text of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Options":
        """The options of a text that `to_json` has made."""
        return cls(**json.loads(text))


def from_environment(environ: Mapping[str, str] = os.environ) -> Options | None:
    """The options of the run to which this process belongs; None outside of such a run."""
    text = environ.get(VARIABLE)
    return Options.from_json(text) if text else None


def check(options: Options) -> None:
    """Raise UserError, naming the flag, for options that cannot be simulated."""
    if not 1 <= options.gpus <= MOST_GPUS:
        raise UserError(f"--gpus is {options.gpus}: give a number from 1 to {MOST_GPUS}.")
    _check_name("--gpu", options.gpu, GPUS)
    _check_name("--link", options.link, LINKS)
    if options.between_nodes is not None:
        _check_name("--between-nodes", options.between_nodes, NETWORKS)
    if options.clock not in CLOCKS:
        raise UserError(f"--clock is {options.clock!r}: give real or simulated.")
    per_node = options.gpus_per_node
    if (per_node is None) != (options.between_nodes is None):
        raise UserError(
            "--gpus-per-node and --between-nodes belong together: give both, or neither."
        )
    if per_node is not None and per_node < 1:
        raise UserError(f"--gpus-per-node is {per_node}: give a number from 1 up.")
    if per_node and options.gpus % per_node and per_node % options.gpus:
        raise UserError(
            f"--gpus {options.gpus} cannot be divided into nodes of {per_node}: give a "
            f"--gpus-per-node that divides it, or that is a multiple of it."
        )


def _check_name(flag: str, name: str, table: Mapping[str, object]) -> None:
    if name not in table:
        hint = did_you_mean(name, table) or f"use one of {', '.join(table)}."
        raise UserError(f"{flag} is {name!r}: {hint}")


def memory_in_bytes(text: str) -> int:
    """The bytes of `--memory`: "64MiB" gives 2**26. Raises UserError for anything else."""
    try:
        return size_in_bytes(int(text) if text.isdecimal() else text)
    except UserError:
        raise UserError(
            f"--memory is {text!r}: give bytes, or a size such as 64MiB or 1.5GiB."
        ) from None
