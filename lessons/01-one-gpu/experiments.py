"""The longer experiments of lesson 01: a device with a queue, and images that are read slowly.

They sleep as long as a GPU or a disk would take, so they need neither.
"""

import time
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from multigpu.launch.room import available_cores

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
