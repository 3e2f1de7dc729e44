"""The GPUs, links and numbers of GPUs of a prediction, checked."""

from collections.abc import Sequence

from multigpu.errors import UserError, pluralize
from multigpu.virtual.sim.network import Network
from multigpu.virtual.sim.presets import LINKS, NETWORKS, Link, find_preset

# The GPUs of a node, if a network between nodes is given and their number is not: a DGX's.
PER_NODE = 8
# GPUs of the largest node; larger machines with NVLink need --between-nodes here.
MOST_IN_ONE_NODE = 16
MOST_GPUS = 100_000
MOST_SAMPLES = 1_000_000_000


def network(
    link: str | Link, between_nodes: str | Link | None, gpus_per_node: int | None
) -> Network:
    """The network of the cluster. Raises UserError for links that cannot be used like this."""
    inside = find_preset(link, LINKS)
    if between_nodes is None:
        if gpus_per_node is not None:
            raise UserError(
                f"nodes of {pluralize(gpus_per_node, 'GPU')} need a link between them: give "
                f"--between-nodes, one of {', '.join(NETWORKS)}; or leave --gpus-per-node out."
            )
        return Network(inside)
    between = find_preset(between_nodes, NETWORKS)
    if inside.adapter is not None:
        names = [name for name in LINKS if name not in NETWORKS]
        raise UserError(
            f"{inside.name} joins nodes, but --link joins the GPUs inside a node: give one of "
            f"{', '.join(names)}."
        )
    return Network(inside, between, PER_NODE if gpus_per_node is None else gpus_per_node)


def check_sizes(gpus: Sequence[int], joined: Network) -> list[int]:
    """The numbers of GPUs, each once, in order.

    Raises UserError for an empty list, for a number that is no whole number from 1 to
    MOST_GPUS, and for GPUs that do not fill their nodes.
    """
    if not gpus:
        raise UserError("--gpus is empty: give numbers of GPUs, such as 1,8,64,1024.")
    per_node = joined.gpus_per_node
    for count in gpus:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UserError(
                f"--gpus has {count!r}: a number of GPUs is a whole number from 1 up."
            )
        if count > MOST_GPUS:
            raise UserError(f"--gpus has {count:,}: give at most {MOST_GPUS:,} GPUs.")
        if per_node and count > per_node and count % per_node:
            less = count - count % per_node
            raise UserError(
                f"{count:,} GPUs do not fill nodes of {per_node}: give {less:,} or "
                f"{less + per_node:,}, or another --gpus-per-node."
            )
        if joined.between is None and joined.link.adapter is None and count > MOST_IN_ONE_NODE:
            raise UserError(
                f"{count:,} GPUs do not fit into one node: give --between-nodes, one of "
                f"{', '.join(NETWORKS)}."
            )
    return sorted(set(gpus))


def split(
    gpus: Sequence[int], global_batch: int | None, per_gpu: int | None, default: int
) -> dict[int, int]:
    """The samples of each GPU's step, for each number of GPUs.

    With `global_batch` the step's samples are the same for all (strong scaling), with
    `per_gpu` those of a GPU (weak scaling); without both, each GPU has `default`. Raises
    UserError if both are given, and if a batch cannot be divided evenly.
    """
    for flag, value in (("--global-batch", global_batch), ("--per-gpu", per_gpu)):
        if value is not None and not 1 <= value <= MOST_SAMPLES:
            raise UserError(
                f"{flag} is {value:,}: give a whole number from 1 to {MOST_SAMPLES:,}."
            )
    if global_batch is not None and per_gpu is not None:
        raise UserError(
            "--global-batch (strong scaling) and --per-gpu (weak scaling) exclude each other: "
            "give one of them."
        )
    if global_batch is None:
        return dict.fromkeys(gpus, per_gpu or default)
    for count in gpus:
        if global_batch % count:
            near = max(1, round(global_batch / count)) * count
            raise UserError(
                f"--global-batch {global_batch:,} cannot be split evenly over {count:,} GPUs: "
                f"give {near:,}, or another multiple of {count:,}."
            )
    return {count: global_batch // count for count in gpus}
