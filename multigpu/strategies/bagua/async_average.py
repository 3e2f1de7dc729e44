"""async: a thread averages the weights during training (Bagua's asynchronous average).

The threads of n ranks make an averaging round every `sync_interval_ms`: (1) they vote whether
to continue, (2) each takes a snapshot c of its weights, (3) they sum the snapshots to S, (4)
each adds S/n − c to its weights. So the steps that a rank made after its snapshot are kept.
A round does not change the mean over the ranks. A rank's training waits for its own thread
while that copies or adds vectors, but not for another rank.

Under the Trainer the ranks wait for each other
- when training starts, at the end of each epoch, and in each validation,
- when a checkpoint is saved, and in collectives of the user's hooks.
A step's value that is logged with sync_dist=True is therefore this rank's own; an epoch's
value is the mean over all ranks. trainer.should_stop ends training with the epoch. A scheduler
with interval="step" that monitors a metric compares the ranks after every batch, so they wait.
"""

import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from multigpu.errors import UserError
from multigpu.network import wire
from multigpu.strategies.bagua.base import Algorithm, Wrap
from multigpu.strategies.bagua.weights import Weights, broadcast_model
from multigpu.strategies.bagua.weights_lock import FairLock, TrainingLock
from multigpu.strategies.ranks import num_ranks


class AsyncModelAverage(Algorithm):
    """Ranks train at their own speed, and a thread per rank averages the weights.

    sync_interval_ms   milliseconds between two rounds, above 0. (In Bagua, 0 means that the
                       weights are never averaged.)

    A rank sends 8N(n−1)/n bytes per round for N float32 weights. As in Bagua, a lock is held
    from before each forward to after its backward, so the weights do not change in between. It
    is also held during `optimizer.step()`, the snapshot and the addition: see weights_lock.py.
    All ranks must call `close`; the first call ends the rounds on all ranks. At the end the
    weights still differ between ranks. Buffers are not averaged; all ranks start from rank
    0's.

    averaging_rounds   the number of averaging rounds so far
    round_lock         held by the thread during a round; acquire it to pause the rounds
    """

    ranks_step_together = False

    def __init__(self, sync_interval_ms: float = 500):
        if sync_interval_ms <= 0:
            raise UserError(
                f"sync_interval_ms is {sync_interval_ms}: expected an interval above 0."
            )
        self.interval = sync_interval_ms / 1000
        self.size = 1
        self.averaging_rounds = 0
        self.failure: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.training_lock: TrainingLock | None = None
        self.handles: list[RemovableHandle] = []

    def attach(self, model: nn.Module, optimizers: list[Optimizer], wrap: Wrap) -> nn.Module:
        """The model itself, with hooks."""
        if self.thread is not None:
            # An earlier run has failed, and its thread ends soon.
            self.thread.join()
        self.failure = None
        self.size = num_ranks()
        # Not created in the constructor: locks cannot be pickled, and spawned ranks get a
        # pickled object.
        self.weights_lock = FairLock()
        self.round_lock = threading.Lock()
        self.stop = threading.Event()
        if self.size == 1:
            return model
        broadcast_model(model)
        self.weights = Weights(model)
        # The thread has its own groups, because its collectives and those of the training have
        # no common order.
        self.group = self.vote_group = dist.new_group()
        if dist.get_backend(self.group) == "nccl":
            # A vote with NCCL would wait for the training's kernels. gloo runs on the CPU.
            self.vote_group = dist.new_group(backend="gloo")
        for optimizer in optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self._before_step))
        self.training_lock = TrainingLock(self.weights_lock, model, optimizers)
        self.thread = threading.Thread(target=self._run, name="model average", daemon=True)
        self.thread.start()
        return model

    def bytes_per_round(self) -> float:
        """Bytes that this rank sends per round, vote included: the mean of three rounds.

        Call it while nothing else is sent. The count begins and ends between two rounds, so it
        contains only whole rounds, and at most one vote more or less.
        """
        with self.round_lock:
            before = wire.bytes_sent()
            first = self.averaging_rounds
        while self.averaging_rounds < first + 3 and self.thread.is_alive():
            time.sleep(0.001)
        with self.round_lock:
            return (wire.bytes_sent() - before) / max(1, self.averaging_rounds - first)

    def close(self) -> None:
        """End the threads of all ranks. Raises RuntimeError if this rank's thread failed."""
        self.detach()
        if self.size == 1:
            return
        self.thread.join()
        self._raise_failure()
        # Wait for all ranks. A rank that left the group earlier would break the last vote.
        dist.barrier()
        # torch cannot destroy a single group if its backend is written in Python.
        if dist.get_backend(self.group) != "vgpu":
            for group in {self.group, self.vote_group}:
                dist.destroy_process_group(group)
        self.group = self.vote_group = None
        # A second call of `close` then has nothing to do.
        self.size = 1

    def detach(self) -> None:
        """Remove the hooks, and vote to end the rounds, without waiting for other ranks."""
        if self.training_lock is not None:
            self.training_lock.close()
            self.training_lock = None
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if self.size > 1:
            self.stop.set()

    def _before_step(self, *_: object) -> None:
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RuntimeError(
                "the thread that averages the weights has failed"
            ) from self.failure

    def _run(self) -> None:
        try:
            while self._vote():
                with self.round_lock:
                    self._average()
        except BaseException as failure:
            self.failure = failure

    def _vote(self) -> bool:
        """Wait for the interval, then vote. Returns True if all ranks continue."""
        self.stop.wait(self.interval)
        ends = torch.tensor(int(self.stop.is_set()))
        dist.all_reduce(ends, dist.ReduceOp.MAX, self.vote_group)
        return not ends

    def _average(self) -> None:
        """One averaging round."""
        with self.weights_lock:
            snapshot = [_to_send(vector) for vector in self.weights.copy()]
        changes = []
        for vector in snapshot:
            total = vector.clone()
            work = dist.all_reduce(total, group=self.group, async_op=True)
            # NCCL's wait would block the training's kernels, too.
            while vector.is_cuda and not work.is_completed():
                time.sleep(0.001)
            work.wait()
            changes.append(total / self.size - vector)
        with self.weights_lock:
            self.weights.add_outside_autograd(changes)
        self.averaging_rounds += 1


def _to_send(vector: torch.Tensor) -> torch.Tensor:
    """The vector; a copy on the CPU if it is on a virtual GPU.

    Collectives of two threads would make a virtual GPU's simulated time wrong.
    """
    return vector.cpu() if vector.device.type == "vgpu" else vector
