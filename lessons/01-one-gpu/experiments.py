"""The longer experiments of lesson 01: where the time of a step goes, a device with a queue,
and images that are read slowly.

The device and the images sleep as long as a GPU or a disk would take, so they need neither.
"""

import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, pairwise
from operator import attrgetter
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch.profiler import profile
from torch.utils.data import DataLoader, Dataset, get_worker_info

from multigpu import files
from multigpu.launch.room import available_cores

# ---- the parts of a step --------------------------------------------------------------------


def now(device: torch.device, clock: Callable[[], float]) -> float:
    """The clock's seconds, read when the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return clock()


def phases(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The median seconds that a step spends on data, forward, backward and update."""
    device = next(model.parameters()).device
    model.train()
    batches = iter(loader)
    times = []
    while True:
        began = now(device, clock)
        batch = next(batches, None)
        if batch is None:
            break
        images, labels = (part.to(device) for part in batch)
        data_read = now(device, clock)

        loss = F.cross_entropy(model(images), labels)
        forward_done = now(device, clock)

        loss.backward()
        backward_done = now(device, clock)

        optimizer.step()
        optimizer.zero_grad()
        updated = now(device, clock)
        times.append([began, data_read, forward_done, backward_done, updated])

    durations = [
        [after - before for before, after in pairwise(readings)]
        for readings in times[min(warm_up, len(times) - 1) :]
    ]
    # Python's median, because torch.profiler would count torch's as a part of the step.
    medians = [median(column) for column in zip(*durations, strict=True)]
    return dict(zip(("data", "forward", "backward", "update"), medians, strict=True))


def profiled(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable,
    trace: Path,
    steps: int = 20,
) -> str:
    """A table of the operations that take longest in a step, without the reading.

    Trains with the first `steps` batches of the loader. The trace is for ui.perfetto.dev.
    """
    # Without this the profiler prints lines of its own, when it starts and when it stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    batches = list(islice(loader, steps))
    with profile() as recorded:
        phases(model, optimizer, batches)
    with files.atomic(trace) as temporary:
        recorded.export_chrome_trace(str(temporary))

    on_cpu = next(model.parameters()).device.type == "cpu"
    microseconds = attrgetter("self_cpu_time_total" if on_cpu else "self_device_time_total")
    longest = sorted(recorded.key_averages(), key=microseconds, reverse=True)[:6]
    # The name of a GPU's kernel can have hundreds of characters.
    keys = [operation.key for operation in longest]
    names = [key if len(key) <= 60 else f"{key[:59]}…" for key in keys]
    width = max(len(name) for name in [*names, "operation"])
    lines = [f"{'operation':<{width}}{'calls per step':>16}{'ms per step':>14}"]
    for name, operation in zip(names, longest, strict=True):
        calls = operation.count / len(batches)
        milliseconds = microseconds(operation) / 1e3 / len(batches)
        lines.append(f"{name:<{width}}{calls:>16.1f}{milliseconds:>14.3f}")
    return "\n".join([*lines, f"trace: {trace}"])


# ---- a queue of operations ------------------------------------------------------------------


class QueueDevice:
    """A device as the host sees a GPU: a queue of operations, executed one after the other.

    A thread executes them, in the order in which `launch` puts them into the queue.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        # The first operation starts the thread. From now on a launch only fills the queue.
        self._last: Future = self._thread.submit(int)
        self.synchronize()

    def launch(self, operation: Callable[[], object]) -> None:
        """Put an operation into the queue, and return at once."""
        self._last = self._thread.submit(operation)

    def synchronize(self) -> None:
        """Wait until all operations in the queue are done; raise the last one's error."""
        self._last.result()


def clock_readings(
    device: QueueDevice,
    operations: Mapping[str, Callable[[], object]],
    wait_after: Collection[str],
) -> dict[str, float]:
    """The milliseconds that a clock shows for each operation, as name: milliseconds.

    The operations are launched one after the other. The clock is read after each of them; if
    its name is in `wait_after`, `synchronize` is called before the clock is read.
    """
    shown = {}
    began = time.perf_counter()
    for name, operation in operations.items():
        device.launch(operation)
        if name in wait_after:
            device.synchronize()
        ended = time.perf_counter()
        shown[name] = 1e3 * (ended - began)
        began = ended
    return shown


# ---- images that are read slowly ------------------------------------------------------------


class SlowImages(Dataset):
    """`count` numbers that stand for images; each takes `seconds` to read.

    The process that reads one waits that long, as for a disk. With `computing` it uses a core
    that long instead, as to decode a photo.
    """

    def __init__(self, count: int, seconds: float, computing: bool = False):
        self.count = count
        self.seconds = seconds
        self.computing = computing

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if self.computing:
            # The thread's own time: two threads that share a core need twice as long.
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        else:
            time.sleep(self.seconds)
        return index


def seconds_on_paper(
    workers: int, read: float, compute: float, computing: bool = False, cores: int = 0
) -> float:
    """The seconds of a step that reads a batch for `read` and computes for `compute` seconds.

    Without workers, a step reads and then computes. Workers read the next batches while the
    step computes, and several of them read at the same time: the slower of both sets the time.
    If reading is `computing`, only as many workers as there are `cores` read at the same time;
    0 means this machine's.
    """
    if workers == 0:
        return read + compute
    at_the_same_time = min(workers, cores or available_cores()) if computing else workers
    return max(read / at_the_same_time, compute)


def seconds_measured(
    workers: int,
    read: float,
    compute: float,
    computing: bool = False,
    batch: int = 16,
    steps: int = 4,
    rounds: int = 2,
) -> float:
    """The seconds of a step in the shortest of some rounds, after one round to warm up.

    A DataLoader with `workers` worker processes reads batches of `batch` images in `read`
    seconds each; the step then sleeps for `compute` seconds, as long as a GPU would compute.

    A round is `steps` steps, and its time is divided by them, because workers finish their
    batches together: some steps wait for a batch, and the next ones do not. So `steps` should
    be a multiple of `workers`.
    """
    images = SlowImages(batch * steps * (1 + rounds), read / batch, computing)
    with warnings.catch_warnings():
        # More workers than cores are no mistake here: most of the time they wait.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        batches = iter(DataLoader(images, batch, num_workers=workers))
    ends = []
    for _ in batches:
        time.sleep(compute)
        ends.append(time.perf_counter())
    last_steps = ends[steps - 1 :: steps]
    return min((end - began) / steps for began, end in pairwise(last_steps))


# ---- how far workers read ahead -------------------------------------------------------------


class CountedImages(Dataset):
    """Numbers that stand for images; `reads` counts in all processes how many were read."""

    def __init__(self, count: int, workers: int):
        self.reads = torch.zeros(workers, dtype=torch.long).share_memory_()  # one per worker
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.reads[get_worker_info().id] += 1
        return index


def batches_read(workers: int, prefetch_factor: int, pause: float = 0.2) -> int:
    """How many batches a loader has read when the training has taken only the first one.

    Waits until no worker has read anything for `pause` seconds.
    """
    images = CountedImages(4 * (workers * prefetch_factor + 1), workers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader = DataLoader(
            images, batch_size=2, num_workers=workers, prefetch_factor=prefetch_factor
        )
        batches = iter(loader)
    next(batches)
    before = -1
    while before != (found := int(images.reads.sum())) or (images.reads == 0).any():
        before = found
        time.sleep(pause)
    return found // 2
