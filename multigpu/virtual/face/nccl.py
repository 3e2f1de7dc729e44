"""NCCL and gloo for virtual GPUs: torch's own way to a process group, with our groups.

init_process_group("nccl") makes a ProcessGroupNCCL, and "gloo" a ProcessGroupGloo. While
virtual GPUs look like CUDA both are groups of virtual GPUs: gloo sends the numbers, and the
clock counts NCCL's time (patches/process_group.py). If the process is one rank of a large
world, nothing is sent (patches/world_group.py).
"""

import copy
import functools
import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from multigpu.errors import UserError
from multigpu.virtual.face import world
from multigpu.virtual.faults import Faults, Kill, Slow
from multigpu.virtual.options import from_environment
from multigpu.virtual.patches import flight_recorder
from multigpu.virtual.patches.devices import FACE
from multigpu.virtual.patches.replacing import Replacement, Row, rows, values
from multigpu.virtual.record import VARIABLE as RECORDS
from multigpu.virtual.sim import names
from multigpu.virtual.sim.machine import Machine, running
from multigpu.virtual.sim.memory import Meter
from multigpu.virtual.visible import visible_gpus

_C10D = "torch.distributed.distributed_c10d"
# Minutes. torch's default for NCCL (c10d/ProcessGroupNCCL.hpp).
NCCL_TIMEOUT = timedelta(minutes=10)


class NcclOptions:
    """ProcessGroupNCCL.Options: kept, but nothing of it changes a virtual GPU's group."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.backend = "nccl"
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
    from multigpu.virtual.patches.nccl_group import NcclGroup, open_patient_gloo
    from multigpu.virtual.patches.process_group import VirtualGroup, open_gloo, tensors_in
    from multigpu.virtual.patches.watchdog import watchdog
    from multigpu.virtual.patches.world_group import WorldGroup

    options = from_environment()
    kill = slow = None
    if options is not None:
        watchdog.limit = options.timeout
        kill = options.kill_rank and Kill.parse(options.kill_rank)
        slow = options.slow_rank and Slow.parse(options.slow_rank)
    faults = Faults(kill, slow)
    if records := os.environ.get(RECORDS):
        watchdog.folder = Path(records)

    def place(machine: Machine, index: int) -> tuple[int, int]:
        """The machine of a GPU of this process, and the GPU's number in all machines."""
        number, count = index, len(machine.meters)
        if options is not None:
            number, count = visible_gpus(options.gpus)[index], options.gpus
        # torchrun says on which machine the process is, or Slurm, if srun has started it.
        host = int(os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or 0)
        return host, host * count + number

    class Group(WorldGroup if in_world else VirtualGroup):
        """A group whose devices are the CUDA devices, and the CPU where gloo has a part."""

        takes_host = True

        def _add_face(self) -> None:
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

        def _node(self, meter: Meter) -> int:
            if in_world:
                return super()._node(meter)
            return meter.machine.network.node(place(meter.machine, meter.index)[1])

        def collective(self, method: str, args: tuple) -> dist.Work:
            self._check(args)
            rank = dist.get_rank() if dist.is_initialized() else self.rank()
            faults.begin(rank, running())
            faults.collective(rank)
            return super().collective(method, args)

        def _message(self, name: str, tensors: list, *more: Any) -> dist.Work:
            self._check(tensors)
            return super()._message(name, tensors, *more)

        def device_index(self) -> int:
            """A barrier is on the group's GPU, else on its first, else where the rank says."""
            if self.last_device is not None:
                return self.last_device
            if self.bound_device_id is not None:
                return self.bound_device_id.index
            guess = self.global_rank(self.rank()) % len(running().meters)
            return min(self.used_devices, default=guess)

        def gpu_identity(self) -> torch.Tensor:
            return torch.tensor(
                place(running(), self.device_index()), dtype=torch.float64, device="cpu"
            )

    rules = () if in_world else (NcclGroup,)

    class ProcessGroupNCCL(Group, *rules):
        """NCCL for virtual GPUs. As NCCL it refuses tensors of the CPU."""

        takes_host = False

        def __init__(self, store: dist.Store, rank: int, size: int, options: NcclOptions):
            if in_world:
                super().__init__(rank, size)
            else:
                timeout = options._timeout
                gloo = open_patient_gloo(store, rank, size, timeout)
                NcclGroup.__init__(self, gloo, store, rank, size, timeout)
            # A program can use its options for several groups.
            self.options = copy.copy(options)
            self._add_face()

        def getBackendName(self) -> str:
            return "nccl"

    class ProcessGroupGloo(Group):
        """gloo for tensors of the CPU and of virtual GPUs."""

        def __new__(cls, *arguments: Any, **more: Any) -> "ProcessGroupGloo":
            return super().__new__(Both if _wants_both and not in_world else cls)

        def __init__(
            self, store: dist.Store, rank: int, size: int, timeout: timedelta = timedelta()
        ):
            timeout = timeout or timedelta(minutes=30)
            if in_world:
                super().__init__(rank, size)
            else:
                self._open(store, rank, size, timeout)
            self.options = SimpleNamespace(global_ranks_in_group=[], group_name="")
            self._add_face()

        def _open(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            super().__init__(open_gloo(store, rank, size, timeout), rank, size)

        def getBackendName(self) -> str:
            return "gloo"

        def monitored_barrier(self, *arguments: Any, **more: Any) -> None:
            self.host_gloo.monitored_barrier(*arguments, **more)

    class Both(ProcessGroupGloo, *rules):
        """ "cpu:gloo,cuda:nccl": gloo for tensors of the CPU, NCCL for virtual GPUs."""

        def _open(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            gloo = open_patient_gloo(store, rank, size, timeout)
            NcclGroup.__init__(self, gloo, store, rank, size, timeout)
            self.host_gloo = open_gloo(dist.PrefixStore("host", store), rank, size, timeout)

    ProcessGroupNCCL.Options = NcclOptions
    return ProcessGroupNCCL, ProcessGroupGloo


# Whether the group that torch makes now is one for the CPU and for CUDA.
_wants_both = False


def _helper(original: Any) -> Any:
    """_new_process_group_helper: of a group for two devices torch asks for the first one's."""

    @functools.wraps(original)
    def new_process_group_helper(*arguments: Any, **more: Any) -> Any:
        global _wants_both
        before = _wants_both
        backend = str(more.get("backend", arguments[3] if len(arguments) > 3 else ""))
        _wants_both = "cuda:nccl" in backend and "cpu:gloo" in backend
        try:
            made = original(*arguments, **more)
        finally:
            _wants_both = before
        # torch sets it on the group that ours takes the place of.
        device = more.get("device_id")
        if device is not None and isinstance(made[0], dist.ProcessGroup):
            made[0].bound_device_id = device
            if connect := getattr(made[0], "connect", None):
                connect()
        return made

    return new_process_group_helper


def _split_group(original: Any) -> Any:
    """split_group makes a new group: a virtual GPU's communicator has nothing to share."""

    @functools.wraps(original)
    def split_group(
        parent_pg: Any = None,
        split_ranks: list | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: Any = None,
    ) -> Any:
        parent = parent_pg or dist.group.WORLD
        parent_ranks = dist.get_process_group_ranks(parent)
        members = [parent_ranks[rank] for ranks in split_ranks or () for rank in ranks]
        if (
            dist.group.WORLD.bound_device_id is None
            or len(members) != len(set(members))
            or not members
        ):
            # torch says what is wrong.
            return original(parent_pg, split_ranks, timeout, pg_options, group_desc, backend)
        for ranks in split_ranks:
            if parent.rank() in ranks:
                return dist.new_group(
                    sorted(parent_ranks[rank] for rank in ranks),
                    timeout,
                    backend,
                    pg_options,
                    use_local_synchronization=True,
                    group_desc=group_desc,
                    device_id=dist.group.WORLD.bound_device_id,
                )
        return None

    return split_group


def _set_pg_timeout(original: Any) -> Any:
    """_set_pg_timeout: torch looks for NCCL among a group's backends; ours is the group."""

    @functools.wraps(original)
    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        from multigpu.virtual.patches.nccl_group import NcclGroup

        group = group or dist.group.WORLD
        if not isinstance(group, NcclGroup):
            return original(timeout, group)
        group.timeout = group.options._timeout = timeout

    return set_pg_timeout


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
        listed = [torch.device(device) for device in devices or ()]
        original(self, devices=[device for device in listed if not names.is_virtual(device)])

    return __init__


def _no_json(*arguments: Any, **more: Any) -> NoReturn:
    raise UserError(
        "virtual GPUs have the flight recorder's dump pickled, not as JSON: call "
        "torch._C._distributed_c10d._dump_nccl_trace()."
    )


_NCCL = "a CPU build has no NCCL, and a CUDA build's NCCL needs GPUs"
ROWS: tuple[Row, ...] = (
    *rows(
        (_C10D, "torch.distributed", "torch.distributed.device_mesh"),
        ["split_group"],
        _split_group,
        "C++ splits NCCL's communicator",
    ),
    Replacement(
        _C10D,
        "_new_process_group_helper",
        _helper,
        "a group for CUDA and the CPU is one group of virtual GPUs",
    ),
    Replacement(_C10D, "_set_pg_timeout", _set_pg_timeout, "it asks a backend"),
    Replacement(
        "torch.futures.Future", "__init__", _future, "C++ would ask for CUDA's streams"
    ),
    *values(
        ["torch.distributed.Logger"],
        {"set_construction_data_and_log": lambda logger, *arguments: None},
        "DDP's own log asks a group by the name gloo for its network devices, in C++",
    ),
    *rows(
        (_C10D, "torch.distributed", "torch._C._distributed_c10d"),
        ["ProcessGroupNCCL"],
        _class_of(0),
        _NCCL,
        optional=True,
    ),
    *rows(
        # torch.distributed.rpc takes the second one.
        (_C10D, "torch.distributed"),
        ["ProcessGroupGloo"],
        _class_of(1),
        "gloo of a CPU build takes no tensors of a GPU",
    ),
    *values(
        ["torch._C._distributed_c10d"],
        {"_dump_nccl_trace": flight_recorder.dump, "_dump_nccl_trace_json": _no_json},
        _NCCL,
    ),
    *values(
        [_C10D],
        {"_NCCL_AVAILABLE": True, "default_pg_nccl_timeout": NCCL_TIMEOUT},
        _NCCL,
    ),
)
