"""`multigpu.gpus(2)`: the machine's GPUs if it has enough, otherwise virtual GPUs."""

from collections.abc import Sequence
from typing import Literal

import torch

from multigpu import devices
from multigpu.errors import UserError, pluralize
from multigpu.launch.world import World
from multigpu.virtual import control, face
from multigpu.virtual.options import CLOCKS, Options, from_environment
from multigpu.virtual.sim import machine
from multigpu.virtual.sim.presets import Gpu, Link, find_gpus, size_in_bytes


class Devices(list[torch.device]):
    """The devices cuda:0, cuda:1, …

    As a context manager it ends the virtual GPUs that `gpus` has started. If others ran
    before, GPUs like those are started again; tensors that were on them are lost.
    """

    def __init__(
        self,
        members: Sequence[torch.device],
        started: bool = False,
        before: Options | None = None,
    ):
        super().__init__(members)
        self._started = started
        self._before = before

    def __enter__(self) -> "Devices":
        return self

    def __exit__(self, *error: object) -> None:
        if self._started:
            face.take_off()
            _Running.options = self._before
            if self._before:
                face.put_on(self._before)


def gpus(
    count: int | None = None,
    gpu: str | Gpu | Sequence[str | Gpu] | None = None,
    link: str | Link | None = None,
    memory: int | str | None = None,
    gpus_per_node: int | None = None,
    between_nodes: str | Link | None = None,
    shapes_only: bool = False,
    clock: Literal["real", "simulated"] = "real",
) -> Devices:
    """The devices cuda:0, cuda:1, … for this process: real GPUs, or virtual ones.

        first, second = multigpu.gpus(2)
        with multigpu.gpus(8, gpu="H100-80GB", link="NVLink4", shapes_only=True) as gpus:

    With a count alone, they are the machine's GPUs, or the virtual GPUs that run already, if
    there are enough; otherwise virtual GPUs are started, and a sentence says so. The default
    count is 2. If another argument is given, virtual GPUs like that are always started, in
    place of those that run: tensors of the old ones cannot be used any more. Each process of a
    run sees all GPUs, as with CUDA: rank r takes its own one, `gpus(4)[r]`.

    gpu            a name in multigpu.GPUS, a Gpu, or a list with one for each GPU, whose
                   length is then the default count; default: V100-16GB
    link           a name in multigpu.LINKS, or a Link, between the GPUs; default: NVLink2
    memory         each GPU's capacity, in bytes or as text ("64MiB"); default: its model's
    gpus_per_node  the GPUs of one node, if there are several nodes
    between_nodes  the link between nodes, a name in multigpu.NETWORKS, or a Link
    shapes_only    whether tensors have shapes but no numbers: for times and memory alone
    clock          what the program's own time.time() reads: "real" or "simulated"

    In a `with` block, virtual GPUs that this call started end with the block, and those that
    ran before are started again. Raises UserError for what cannot be simulated, if this
    process uses real GPUs already but needs virtual ones, under `multigpu virtual` if more
    GPUs or others are wanted than it gave, and if torch does not see the GPUs of a Slurm job.
    """
    arguments = (gpu, link, memory, gpus_per_node, between_nodes)
    wanted = (
        any(argument is not None for argument in arguments) or shapes_only or clock != "real"
    )
    command = from_environment()
    running = control.devices() if face.is_on() else []
    if not wanted:
        count = 2 if count is None else count
        if count < 1:
            raise UserError(f"count is {count}: give a number of GPUs from 1 up.")
        if machine.running() is not None and machine.index_named(count - 1) == 0:
            # cuda:1 is another name of cuda:0.
            return Devices([torch.device("cuda", 0)] * count)
        if running and count <= len(running):
            return Devices(running[:count])
        if not running and count <= devices.visible_gpus(World()):
            return Devices([torch.device("cuda", index) for index in range(count)])
    if command is not None:
        request = "others" if wanted else f"{count} GPUs"
        raise UserError(
            f"`multigpu virtual` gives this program {pluralize(len(running), 'GPU')}, and it "
            f"asks for {request}: give the command --gpus, --gpu and --link."
        )
    if clock not in CLOCKS:
        raise UserError(f"clock is {clock!r}: give 'real' or 'simulated'.")
    models = "V100-16GB" if gpu is None else gpu
    models = models if isinstance(models, (str, Gpu)) else tuple(models)
    options = Options(
        gpus=len(find_gpus(models, count)),
        gpu=models,
        link="NVLink2" if link is None else link,
        gpus_per_node=gpus_per_node,
        between_nodes=between_nodes,
        memory=None if memory is None else size_in_bytes(memory),
        shapes_only=shapes_only,
        clock=clock,
    )
    before = _Running.options if running else None
    real = 0 if running else torch.cuda.device_count()
    options.network()  # it raises for an unknown link, before the running GPUs end
    face.take_off()
    started = face.put_on(options)
    _Running.options = options
    if not wanted:
        print(_announcement(len(started), real))
    return Devices(started, started=True, before=before)


class _Running:
    """The options of the virtual GPUs that `gpus` started last in this process."""

    options: Options | None = None


def _announcement(count: int, real: int) -> str:
    """The sentence that says that virtual GPUs compute; `real` is the number of real GPUs."""
    has = pluralize(real, "GPU") if real else "no GPU"
    compute = f"{count} virtual GPUs compute" if count > 1 else "a virtual GPU computes"
    # Two lines, because a notebook has room for 95 columns.
    text = f"This machine has {has}: {compute} on the CPU instead\n({control.label()})."
    if real:
        text += (
            "\nIn this process PyTorch now uses virtual GPUs alone: to use real GPUs, start "
            "another one\n(restart the kernel)."
        )
    return text
