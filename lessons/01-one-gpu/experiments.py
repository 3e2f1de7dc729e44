"""The longer experiments of lesson 01: the parts of a step, and images that are read slowly.

Images and steps sleep as long as a disk or a GPU would take, so they need neither.
"""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import profile
from torch.utils.data import DataLoader, Dataset, get_worker_info

from multigpu import files
from multigpu.errors import pluralize
from multigpu.launch.room import available_cores

Parts = dict[str, float]  # the seconds of a step's parts
# Without this the profiler prints lines of its own, when it starts and when it stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# ---- the parts of a step --------------------------------------------------------------------


def milliseconds(shown: Mapping[str, Parts]) -> dict[str, Parts]:
    """The same parts in ms, for a picture; without those below a microsecond."""
    return {
        name: {part: 1e3 * seconds for part, seconds in parts.items() if seconds > 1e-6}
        for name, parts in shown.items()
    }


def shortest_of_rounds(
    one_epoch: Callable[[int], Parts], sizes: Sequence[int], rounds: int
) -> dict[int, Parts]:
    """For each batch size the parts of a step, each from the round in which it was shortest.

    In a round, each size gets one epoch: `one_epoch(size)`.
    """
    epochs = [{size: one_epoch(size) for size in sizes} for _ in range(rounds)]
    return {
        size: {part: min(epoch[size][part] for epoch in epochs) for part in epochs[0][size]}
        for size in sizes
    }


def per_image(steps: Mapping[int, Parts]) -> dict[str, Parts]:
    """Microseconds for each image: {"batch 16": {part: µs}}."""
    return {
        f"batch {size}": {part: 1e6 * seconds / size for part, seconds in parts.items()}
        for size, parts in steps.items()
    }


def longest_operations(recorded: profile, steps: int, trace: str | Path) -> None:
    """Print the operations that took longest in a step, and write the trace for Perfetto."""
    longest = sorted(
        recorded.key_averages(),
        key=lambda operation: operation.self_cpu_time_total,
        reverse=True,
    )
    print(f"{'operation':<30}{'calls per step':>16}{'ms per step':>14}")
    for operation in longest[:6]:
        calls, ms = operation.count / steps, operation.self_cpu_time_total / 1e3 / steps
        print(f"{operation.key:<30}{calls:>16.1f}{ms:>14.3f}")
    files.writable_folder(Path(trace).parent)
    with files.atomic(Path(trace)) as temporary:
        recorded.export_chrome_trace(str(temporary))


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


def measured_step(
    workers: int, read: float, compute: float, gpus: str, computing: bool = False
) -> float:
    """The ms of a step, measured; prints them beside those on paper."""
    measured = 1e3 * seconds_measured(workers, read, compute, computing)
    on_paper = 1e3 * seconds_on_paper(workers, read, compute, computing)
    result = f"{on_paper:.0f} ms per step on paper, {measured:.0f} ms measured"
    print(f"{gpus}, {pluralize(workers, 'worker')}: {result}")
    return measured


def images_per_second(images: Dataset, workers: int, stay: bool = True) -> float:
    """How fast a loader reads batches of 64: the fastest of three epochs, after the first.

    With `stay` the workers start once, otherwise in each epoch.
    """
    loader = DataLoader(
        images, 64, num_workers=workers, persistent_workers=stay and workers > 0
    )
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        for _ in loader:
            pass
        seconds.append(time.perf_counter() - began)
    return len(images) / min(seconds[1:])


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
    while before != (read := int(images.reads.sum())) or (images.reads == 0).any():
        before = read
        time.sleep(pause)
    return read // 2
