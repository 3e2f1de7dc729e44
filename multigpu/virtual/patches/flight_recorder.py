"""torch's flight recorder for virtual GPUs: the last works of NCCL's groups.

Variables, defaults and fields are those of torch 2.13's build for CUDA (c10d's
FlightRecorderDetail.hpp, FlightRecorder.cpp and ProcessGroupNCCL.cpp), so that torchfrtrace
reads the dumps. Two things differ: an entry exists before its communicator has connected all
ranks, so that a run whose first collective stands still has one, and there are no durations.
"""

import functools
import os
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from multigpu.errors import UserError

if TYPE_CHECKING:
    from multigpu.virtual.patches.communicator import Kernel
    from multigpu.virtual.patches.nccl_group import NcclGroup

VERSION = "2.10"
NCCL_VERSION = "2.27.3"
COALESCED = "nccl:coalesced"
# The shapes and types of a collective's inputs, or of its outputs.
Side = Sequence[tuple[Sequence[int], torch.dtype | None]]
NOTHING: Side = [((0,), None)]
PACKAGE = str(Path(__file__).parents[2])
# c10::ScalarType's names, where they are not those of Python with a capital letter.
DTYPES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16",
    "int64": "Long", "int32": "Int", "int8": "Char", "uint8": "Byte",
    "complex64": "ComplexFloat", "complex128": "ComplexDouble",
}  # fmt: skip


@dataclass(slots=True)
class Entry:
    """A collective, a message, or a batch of messages. `fields` are those that do not change.

    `kernel` is None before the launch, and for a message of a batch: torch's entry of the
    batch has its state.
    """

    fields: dict[str, Any]
    traceback: Any
    kernel: "Kernel | None" = None


class Recorder:
    """The ring buffer of a process, with the last `size` entries; 0 for none."""

    def __init__(self):
        names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
        size = variable("2000", *names)
        if not size.isdigit():
            raise UserError(f"{names[0]} is {size!r}: give a number of entries, 0 for none.")
        self.size = int(size)
        self.entries: deque[Entry] = deque(maxlen=self.size)
        # Without timing NCCL does not learn when a kernel starts.
        self._timing = flag("TORCH_NCCL_ENABLE_TIMING", False)
        self._count = 0
        self._operations: Counter[int] = Counter()
        self._groups: dict[str, dict[str, str]] = {}

    def record(
        self,
        group: "NcclGroup",
        name: str,
        inputs: Side,
        outputs: Side,
        is_message: bool = False,
    ) -> Entry | None:
        """Add an entry; `name` is torch's, such as "nccl:all_reduce"; None if it is off."""
        if not self.size:
            return None
        # A batch is no operation of its own.
        self._operations[group.number] += bool(inputs or outputs)
        if group.group_name not in self._groups:
            self._groups[group.group_name] = {
                "name": group.group_name,
                "desc": group.group_desc,
                "ranks": str([group.global_rank(rank) for rank in range(group.size())]),
            }
        fields = {
            "record_id": self._count,
            "pg_id": group.number,
            "process_group": (group.group_name, group.group_desc),
            "thread_name": _thread_name(threading.get_ident()),
            "thread_id": str(threading.get_ident()),
            "collective_seq_id": group.sequence,
            "p2p_seq_id": group.sequence_of_messages,
            "op_id": self._operations[group.number],
            "profiling_name": name,
            "time_created_ns": time.time_ns(),
            "input_sizes": [list(shape) for shape, _ in inputs],
            "input_dtypes": [dtype_name(dtype) for _, dtype in inputs],
            "output_sizes": [list(shape) for shape, _ in outputs],
            "output_dtypes": [dtype_name(dtype) for _, dtype in outputs],
            "timeout_ms": round(group.timeout.total_seconds() * 1000),
            "is_p2p": is_message,
        }
        self._count += 1
        traceback = torch._C._profiler.gather_traceback(True, True, False)
        entry = Entry(fields, traceback)
        self.entries.append(entry)
        return entry

    def state(self, entry: Entry) -> dict[str, Any]:
        """The fields that change."""
        kernel = entry.kernel
        started = kernel.started if kernel and self._timing else None
        ended = kernel.ended if kernel else None
        return {
            "state": "completed" if ended else "started" if started else "scheduled",
            "time_discovered_started_ns": started,
            "time_discovered_completed_ns": ended,
            "retired": ended is not None,
        }

    def dump(self, collectives: bool, stacks: bool, active: bool) -> dict:
        """All that is known; `active` leaves out the kernels that have ended."""
        recorded = list(self.entries)
        entries = [entry.fields | self.state(entry) for entry in recorded]
        if stacks:
            tracebacks = [entry.traceback for entry in recorded]
            symbolized = torch._C._profiler.symbolize_tracebacks(tracebacks)
            for entry, frames in zip(entries, symbolized, strict=True):
                entry["frames"] = [
                    frame for frame in frames if not frame["filename"].startswith(PACKAGE)
                ]
        dumped = {
            "version": VERSION,
            "pg_config": dict(self._groups),
            "comm_lib_version": NCCL_VERSION,
            "pg_status": _status(entries),
        }
        if collectives:
            dumped["entries"] = [e for e in entries if not active or e["state"] != "completed"]
        return dumped

    def write(self, rank: int) -> str:
        """Write the dump of a rank; return a line about it, "" if the recorder is off."""
        if not self.size or not flag("TORCH_NCCL_DUMP_ON_TIMEOUT", True):
            return ""
        home = variable("/tmp", "HOME")
        cache = Path(variable("", "XDG_CACHE_HOME") or f"{home}/.cache")
        default = cache / "torch" / "comm_lib_trace_rank_"
        names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        path = Path(f"{variable(str(default), *names)}{rank}")
        stacks = flag("TORCH_INCLUDE_STACK_TRACE", True)
        dumped = self.dump(True, stacks, flag("TORCH_INCLUDE_ONLY_ACTIVE", False))
        try:
            if path.parent == default.parent:
                path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(dumped, protocol=2))
        except OSError as error:
            return f"multigpu: rank {rank} could not write its flight recorder: {error}\n"
        return f"multigpu: rank {rank} has written its flight recorder to {path}\n"


@functools.cache
def recorder() -> Recorder:
    """The process's recorder. As in torch its size is that of the first call."""
    return Recorder()


def dump(
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
) -> bytes:
    """torch._C._distributed_c10d._dump_nccl_trace: the dump, pickled."""
    stacks = includeStackTraces is not False
    return pickle.dumps(
        recorder().dump(includeCollectives is not False, stacks, bool(onlyActive)), protocol=2
    )


def _status(entries: list[dict]) -> dict[str, dict[str, int]]:
    """The number of each group's last kernel of each state; -1 for none."""
    statuses: dict[str, dict[str, int]] = {}
    for entry in entries:
        status = statuses.setdefault(
            str(entry["pg_id"]),
            {f"last_{state}_collective": -1 for state in ("enqueued", "started", "completed")},
        )
        is_message = entry["is_p2p"] or entry["profiling_name"] == COALESCED
        number = entry["p2p_seq_id" if is_message else "collective_seq_id"]
        status["last_enqueued_collective"] = number
        for state in ("started", "completed"):
            if entry[f"time_discovered_{state}_ns"]:
                status[f"last_{state}_collective"] = number
    return statuses


def dtype_name(dtype: torch.dtype | None) -> str:
    """C++'s name of a type: "Float" for torch.float32."""
    if dtype is None:
        return "Undefined"
    name = str(dtype).removeprefix("torch.")
    return DTYPES.get(name, name.capitalize())


@functools.cache
def _thread_name(thread: int) -> str:
    """The system's name of this thread."""
    try:
        return Path("/proc/thread-self/comm").read_text().strip()
    except OSError:
        return threading.current_thread().name


def variable(default: str, *names: str) -> str:
    """The value of the first of these variables that is set."""
    return next((os.environ[name] for name in names if name in os.environ), default)


def flag(name: str, default: bool) -> bool:
    """The value of a variable that says yes or no, as torch reads it."""
    value = os.environ.get(name)
    return default if value is None else value.lower() in ("1", "t", "true", "y", "yes")
