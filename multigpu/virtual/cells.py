"""In a notebook: `multigpu.virtual_cuda()` lets the next cells use CUDA without a GPU."""

from collections.abc import Sequence
from typing import Literal

import torch

from multigpu.errors import UserError
from multigpu.vgpu.sim.presets import Gpu, find_gpus, size_in_bytes
from multigpu.virtual import face
from multigpu.virtual.options import CLOCKS, Options


class Devices(list[torch.device]):
    """The devices cuda:0, cuda:1, … As a context manager it takes the face off at the end."""

    def __enter__(self) -> "Devices":
        return self

    def __exit__(self, *error: object) -> None:
        face.take_off()


def virtual_cuda(
    gpus: int | None = None,
    gpu: str | Gpu | Sequence[str | Gpu] = "V100-16GB",
    link: str = "NVLink2",
    memory: int | str | None = None,
    gpus_per_node: int | None = None,
    between_nodes: str | None = None,
    shapes_only: bool = False,
    clock: Literal["real", "simulated"] = "real",
) -> Devices:
    """Let this process use virtual GPUs as CUDA: "cuda:0", torch.cuda, NCCL.

        multigpu.virtual_cuda(gpus=2, gpu="V100-16GB")
        model = model.to("cuda:1")

    Called again, it replaces the virtual GPUs by new ones, and the tensors of the old ones
    cannot be used any more; so a cell can be run twice. As a context manager it gives torch
    back at the end of the block. The arguments are those of `multigpu virtual`; `gpu` can be a
    Gpu, or a list with one for each GPU, and `memory` is each GPU's capacity in bytes or as
    text ("64MiB"). The default number of GPUs is the list's length, otherwise 2.

    Returns the devices. Raises UserError for what cannot be simulated, and if the process uses
    real GPUs, or virtual ones by the name vgpu.
    """
    if torch.cuda.is_available() and not face.is_on():
        raise UserError(
            "this machine has real GPUs, which torch.cuda shows: use them, or multigpu.gpus() "
            "for virtual GPUs beside them."
        )
    if clock not in CLOCKS:
        raise UserError(f"clock is {clock!r}: give 'real' or 'simulated'.")
    models = gpu if isinstance(gpu, (str, Gpu)) else tuple(gpu)
    options = Options(
        len(find_gpus(models, gpus)),
        models,
        link,
        gpus_per_node,
        between_nodes,
        None if memory is None else size_in_bytes(memory),
        shapes_only,
        clock,
    )
    face.take_off()
    return Devices(face.put_on(options))
