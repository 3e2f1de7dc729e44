"""NCCL and gloo for virtual GPUs: torch's own way to a process group, with our groups.

init_process_group("nccl") makes a ProcessGroupNCCL, and "gloo" a ProcessGroupGloo. While
virtual GPUs look like CUDA both are groups of virtual GPUs: gloo sends the numbers, and the
clock counts NCCL's time (vgpu/patches/process_group.py). If the process is one rank of a large
world, nothing is sent (vgpu/patches/world_group.py).
"""

import copy
import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from multigpu.vgpu.patches.replacing import Replacement, Row
from multigpu.vgpu.sim import names
from multigpu.vgpu.sim.memory import Meter
from multigpu.virtual.face import world
from multigpu.virtual.face.devices import FACE
from multigpu.virtual.options import from_environment
from multigpu.virtual.visible import visible_gpus

_C10D = "torch.distributed.distributed_c10d"
# Minutes. torch's default for NCCL (c10d/ProcessGroupNCCL.hpp).
NCCL_TIMEOUT = timedelta(minutes=10)


class Options:
    """ProcessGroupNCCL.Options: kept, but nothing of it changes a virtual GPU's group."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(
            blocking=-1,
            cga_cluster_size=4,
            min_ctas=1,
            max_ctas=32,
            net_name="",
            split_share=0,
        )
        self._timeout = NCCL_TIMEOUT
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.split_from: Any = None
        self.split_color = 0


def _classes(in_world: bool) -> tuple[type, type]:
    """The classes for NCCL and gloo. Imported late, because the groups import all of c10d.

    `in_world` says whether the process is one rank of a large world.
    """
    from multigpu.vgpu.patches.process_group import VirtualGroup, open_gloo, tensors_in
    from multigpu.vgpu.patches.world_group import WorldGroup

    class Processes(VirtualGroup):
        """A group of processes that share the GPUs of their machine."""

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
            super().__init__(open_gloo(store, rank, size, timeout), rank, size)

        def _node(self, meter: Meter) -> int:
            options = from_environment()
            number, count = meter.index, len(meter.machine.meters)
            if options is not None:
                number, count = visible_gpus(options.gpus)[meter.index], options.gpus
            # torchrun says on which machine the process is.
            machine = int(os.environ.get("GROUP_RANK", "0"))
            return meter.machine.network.node(machine * count + number)

    class OneRank(WorldGroup):
        """A group of a world of which this process is one rank."""

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
            super().__init__(rank, size)

    class Group(OneRank if in_world else Processes):
        """A group whose devices are the CUDA devices, and the CPU where gloo has a part."""

        takes_host = True

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
            super().__init__(store, rank, size, timeout)
            placeholder = self._get_backend(torch.device("cpu"))
            backend_type = dist.ProcessGroup.BackendType.CUSTOM
            self._register_backend(torch._C.device(FACE), backend_type, placeholder)

        @property
        def _device_types(self) -> list[torch.device]:
            devices = [torch._C.device(FACE)]
            return [torch.device("cpu"), *devices] if self.takes_host else devices

        def _set_sequence_number_for_group(self) -> None:
            """Does nothing: the numbers serve NCCL's and gloo's own checks."""

        def _check(self, args: Any) -> None:
            if not self.takes_host:
                for tensor in tensors_in(args):
                    if tensor.device.type == "cpu":
                        # torch's wording.
                        raise RuntimeError("No backend type associated with device type cpu")

        def collective(self, name: str, move: Any, args: tuple) -> dist.Work:
            self._check(args)
            return super().collective(name, move, args)

        def _message(self, name: str, tensors: list, *more: Any) -> dist.Work:
            self._check(tensors)
            return super()._message(name, tensors, *more)

    class ProcessGroupNCCL(Group):
        """NCCL for virtual GPUs. As NCCL it refuses tensors of the CPU."""

        def __init__(self, store: dist.Store, rank: int, size: int, options: Options):
            super().__init__(store, rank, size, options._timeout)
            # A program can use its options for several groups.
            self.options = copy.copy(options)

        @property
        def takes_host(self) -> bool:
            """Whether the group also has a backend for the CPU: "cpu:gloo,cuda:nccl"."""
            world = torch.distributed.distributed_c10d._world
            return "cpu:" in world.pg_backend_config.get(self, "")

        def getBackendName(self) -> str:
            return "nccl"

    class ProcessGroupGloo(Group):
        """gloo for tensors of the CPU and of virtual GPUs."""

        def __init__(
            self, store: dist.Store, rank: int, size: int, timeout: timedelta = timedelta()
        ):
            super().__init__(store, rank, size, timeout or timedelta(minutes=30))
            self.options = SimpleNamespace(global_ranks_in_group=[], group_name="")

        def getBackendName(self) -> str:
            return "gloo"

        def monitored_barrier(self, *arguments: Any, **more: Any) -> None:
            self.gloo.monitored_barrier(*arguments, **more)

    ProcessGroupNCCL.Options = Options
    return ProcessGroupNCCL, ProcessGroupGloo


# The classes, by whether the process is one rank of a large world.
_made: dict[bool, tuple[type, type]] = {}


def _class_of(number: int) -> Any:
    def make(original: Any) -> type:
        in_world = world.is_wanted()
        if in_world not in _made:
            _made[in_world] = _classes(in_world)
        return _made[in_world][number]

    return make


def _future(original: Any) -> Any:
    """torch.futures.Future.__init__ without the virtual devices among `devices`.

    With devices a future waits for their streams, but the numbers of a virtual GPU are there
    when its work is launched.
    """

    def __init__(self: torch.futures.Future, *, devices: Any = None) -> None:
        given = [torch.device(device) for device in devices or ()]
        original(self, devices=[one for one in given if not names.is_virtual(one)])

    return __init__


def _not_logged(original: Any) -> Any:
    def set_construction_data_and_log(self: Any, *arguments: Any) -> None:
        """Does nothing."""

    return set_construction_data_and_log


_NCCL = "a CPU build has no NCCL, and a CUDA build's NCCL needs GPUs"
ROWS: tuple[Row, ...] = (
    Replacement(
        "torch.futures.Future", "__init__", _future, "C++ would ask for CUDA's streams"
    ),
    Replacement(
        "torch.distributed.Logger",
        "set_construction_data_and_log",
        _not_logged,
        "DDP's own log asks a group by the name gloo for its network devices, in C++",
        when=dist.is_available,
    ),
    *(
        Replacement(
            owner,
            "ProcessGroupNCCL",
            _class_of(0),
            _NCCL,
            when=dist.is_available,
            optional=True,
        )
        for owner in (_C10D, "torch.distributed", "torch._C._distributed_c10d")
    ),
    *(
        Replacement(
            module,
            "ProcessGroupGloo",
            _class_of(1),
            "gloo of a CPU build takes no tensors of a GPU",
            when=dist.is_available,
        )
        # torch.distributed.rpc takes the second one.
        for module in (_C10D, "torch.distributed")
    ),
    Replacement(
        _C10D, "_NCCL_AVAILABLE", lambda original: True, _NCCL, when=dist.is_available
    ),
    Replacement(
        _C10D,
        "default_pg_nccl_timeout",
        lambda original: NCCL_TIMEOUT,
        _NCCL,
        when=dist.is_available,
    ),
)
