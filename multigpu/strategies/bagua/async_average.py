"""async: a thread averages the weights while training goes on: Bagua's asynchronous average.

The ranks' threads make an averaging round every `sync_interval_ms`: (1) they vote whether to
go on, (2) each takes a snapshot c of its weights, (3) they sum the snapshots to S, (4) each
adds S/n − c to its weights. So the steps that a rank made since its snapshot are kept, and a
round does not change the mean over the ranks.
"""

import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from multigpu.errors import UserError
from multigpu.strategies.bagua.base import Algorithm, Target
from multigpu.strategies.weights import Weights, broadcast_model, num_ranks


class AsyncModelAverage(Algorithm):
    """Ranks train at their own speed: 8N(n−1)/n bytes per round and rank, N float32 weights.

    In the first `warmup_steps` steps DDP averages the gradients. Then the rounds begin. A lock
    keeps `optimizer.step()`, the snapshot and the addition from overlapping. Between a forward
    and its backward a round may change the weights, so the gradient mixes both: this is the
    price of not waiting. All ranks call `close`; the first one's vote ends the rounds on all.
    The weights then still differ. Buffers stay different between ranks; all start from rank
    0's.

    averaging_rounds   the number of averaging rounds so far
    round_lock         held during a round, so its holder is between two rounds
    """

    def __init__(self, sync_interval_ms: float = 500, warmup_steps: int = 0):
        if sync_interval_ms < 0 or warmup_steps < 0:
            raise UserError(
                f"sync_interval_ms={sync_interval_ms}, warmup_steps={warmup_steps}: "
                f"neither may be negative."
            )
        self.interval = sync_interval_ms / 1000
        self.warmup_steps = warmup_steps
        self.size = 1
        self.averaging_rounds = 0
        self.steps_made = 0
        self.step_holds_lock = False
        self.failure: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.wrapped: DistributedDataParallel | None = None
        self.handles: list[RemovableHandle] = []

    def _attach(self, target: Target) -> nn.Module:
        """The model itself with hooks; in DDP if there is a warm-up."""
        if self.thread is not None:
            # An earlier run has failed; its thread is about to end.
            self.thread.join()
        self.size = num_ranks(target.group)
        self.outer_group = target.group
        # The object may be attached again after `close`.
        self.steps_made = 0
        self.thread = None
        # Made here and not in the constructor: locks cannot be pickled for spawned ranks.
        self.weights_lock = threading.Lock()
        self.round_lock = threading.Lock()
        self.stop = threading.Event()
        if self.size == 1:
            if self.warmup_steps and dist.is_initialized():
                return target.wrap(target.model)
            return target.model
        broadcast_model(target.model, target.group)
        self.weights = Weights(target.model)
        self._make_groups()
        for optimizer in target.optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self._before_step))
            self.handles.append(optimizer.register_step_post_hook(self._after_step))
        if not self.warmup_steps:
            self._start()
            return target.model
        self.wrapped = target.wrap(target.model)
        return self.wrapped

    def _make_groups(self) -> None:
        # Groups of their own: the thread's collectives and the training's have no common
        # order.
        members = dist.get_process_group_ranks(self.outer_group or dist.group.WORLD)
        local = self.outer_group is not None
        self.group = dist.new_group(members, use_local_synchronization=local)
        self.vote_group = self.group
        if dist.get_backend(self.group) == "nccl":
            # NCCL's votes would wait for the training's kernels, gloo's run on the host.
            self.vote_group = dist.new_group(members, "gloo", use_local_synchronization=local)

    def close(self) -> None:
        """End the thread together with the other ranks'. Raises RuntimeError if it failed."""
        self.detach()
        if self.size == 1:
            return
        if self.thread is not None:
            self.thread.join()
        self._raise_failure()
        # Until here: a rank that leaves the group earlier breaks the others' last vote.
        dist.barrier(self.outer_group)
        # torch cannot destroy one group of a backend that is written in Python.
        if dist.get_backend(self.group) != "vgpu":
            for group in {self.group, self.vote_group}:
                dist.destroy_process_group(group)
        self.group = None
        self.vote_group = None
        self.wrapped = None
        # A second call then has nothing to do.
        self.size = 1

    def detach(self) -> None:
        """Remove the hooks, and vote to end the rounds, without waiting for the others."""
        self._release()
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if self.size > 1:
            self.stop.set()

    def _before_step(self, *_: object) -> None:
        self._raise_failure()
        # The lock is still held if the last step raised an error: its post hook did not run.
        if not self.step_holds_lock:
            self.weights_lock.acquire()
            self.step_holds_lock = True

    def _after_step(self, *_: object) -> None:
        self._release()
        self.steps_made += 1
        if self.thread is None and self.steps_made >= self.warmup_steps:
            # What DDP.no_sync() sets, from now on: DDP averages no more gradients.
            self.wrapped.require_backward_grad_sync = False
            self._start()

    def _release(self) -> None:
        if self.step_holds_lock:
            self.step_holds_lock = False
            self.weights_lock.release()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RuntimeError(
                "the thread that averages the weights has failed"
            ) from self.failure

    def _start(self) -> None:
        self.thread = threading.Thread(target=self._run, name="model average", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while self._vote():
                with self.round_lock:
                    self._average()
        except BaseException as failure:
            self.failure = failure

    def _vote(self) -> bool:
        """Wait for the interval; True if all ranks go on."""
        self.stop.wait(self.interval)
        vote = torch.tensor([0 if self.stop.is_set() else 1], dtype=torch.int32)
        dist.all_reduce(vote, dist.ReduceOp.MIN, self.vote_group)
        return bool(vote.item())

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
    """The vector, on the host if it is a virtual GPU's.

    Collectives of two threads would mix up a virtual GPU's simulated time.
    """
    return vector.cpu() if vector.device.type == "vgpu" else vector
