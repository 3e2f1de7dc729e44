"""Must ranks wait for each other at all? In Bagua's asynchronous model average a thread averages while the training goes on.

Every `sync_interval_ms` the ranks' threads meet: (1) a vote whether to go on, (2) each takes a snapshot c of its weights,
(3) they sum the snapshots to S, (4) each adds S/n − c to its weights. So the steps that a rank made since its snapshot are
kept, and the mean over the ranks does not change by the exchange.
"""

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.strategies.weights import Weights, ranks, same_start


class AsyncModelAverage:
    """The ranks train on their own, at their own speed; 8N(n−1)/n bytes a sync and rank, for N float32 weights.

    In the first `warmup_steps` steps the gradients are averaged, by DDP. A lock keeps `optimizer.step()`, the snapshot and the
    addition apart from each other. Between a forward and its backward the weights may move, and the gradient is then of
    both: this is the price. All ranks call `close`; when the first does, the syncs end on all. It does not make the
    weights equal. Buffers stay each rank's own; all start from rank 0's.
    """

    def __init__(self, sync_interval_ms: float = 500, warmup_steps: int = 0):
        if sync_interval_ms < 0 or warmup_steps < 0:
            raise UserError(
                f"sync_interval_ms={sync_interval_ms}, warmup_steps={warmup_steps}: none is below 0."
            )
        self.interval, self.warmup = sync_interval_ms / 1000, warmup_steps
        self.size, self.syncs, self.made = 1, 0, 0  # ranks; exchanges, and steps of this rank
        self.locked = False  # the training thread has the lock
        self.failure: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.wrapped: DistributedDataParallel | None = None
        self.handles: list = []

    def attach(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        wrap: Callable[[nn.Module], DistributedDataParallel],
        group: dist.ProcessGroup | None = None,
    ) -> nn.Module:
        """The model itself, with hooks; in DDP if there is a warm-up, after which DDP is silent. A collective."""
        if self.thread is not None:  # of a run that has failed
            self.thread.join()
        self.size, self.outer = ranks(group), group
        self.made, self.thread = 0, None  # it may have been closed, and be used again
        self.lock, self.stop = (
            threading.Lock(),
            threading.Event(),
        )  # here: they cannot travel to a spawned rank
        self.syncing = threading.Lock()  # who takes it stands between two syncs
        if self.size == 1:
            return wrap(model) if self.warmup and dist.is_initialized() else model
        same_start(model, group)
        self.weights = Weights(model)
        # A group of its own: the thread's collectives and the training's have no common order.
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        apart = {"use_local_synchronization": group is not None}
        self.group = dist.new_group(members, **apart)
        # Votes are the host's: NCCL's would wait for the training's kernels.
        self.votes = (
            dist.new_group(members, "gloo", **apart)
            if dist.get_backend(self.group) == "nccl"
            else self.group
        )
        for optimizer in optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self._before))
            self.handles.append(optimizer.register_step_post_hook(self._after))
        if not self.warmup:
            self._start()
            return model
        self.wrapped = wrap(model)
        return self.wrapped

    def close(self) -> None:
        """End the thread, with those of all ranks. Raises RuntimeError if it had failed."""
        self.detach()
        if self.size == 1:
            return
        if self.thread is not None:
            self.thread.join()
        self._tell()
        dist.barrier(
            self.outer
        )  # a rank that lets go of the group first would take it from the others' last vote
        if (
            dist.get_backend(self.group) != "vgpu"
        ):  # torch cannot end one group of a backend written in Python
            for group in {self.group, self.votes}:
                dist.destroy_process_group(group)
        self.group = self.votes = self.wrapped = None
        self.size = 1  # closed: a second call has nothing to do

    def detach(self) -> None:
        """Take the hooks off, and vote to end the syncs, without waiting for it."""
        self._release()
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if self.size > 1:
            self.stop.set()

    def _before(self, *_: object) -> None:
        self._tell()
        if not self.locked:  # it still is, if the last step raised: no post hook ran
            self.lock.acquire()
            self.locked = True

    def _after(self, *_: object) -> None:
        self._release()
        self.made += 1
        if self.thread is None and self.made >= self.warmup:
            self.wrapped.require_backward_grad_sync = (
                False  # what DDP.no_sync() sets, from now on
            )
            self._start()

    def _release(self) -> None:
        if self.locked:
            self.locked = False
            self.lock.release()

    def _tell(self) -> None:
        if self.failure is not None:
            raise RuntimeError(
                "the thread that averages the weights has failed"
            ) from self.failure

    def _start(self) -> None:
        self.thread = threading.Thread(target=self._run, name="model average", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while self._all_go_on():
                with self.syncing:
                    self._sync()
        except BaseException as failure:
            self.failure = failure

    def _all_go_on(self) -> bool:
        self.stop.wait(self.interval)
        vote = torch.tensor([0 if self.stop.is_set() else 1], dtype=torch.int32)
        dist.all_reduce(vote, dist.ReduceOp.MIN, self.votes)
        return bool(vote.item())

    def _sync(self) -> None:
        with self.lock:
            snapshot = [self._sent_as(vector) for vector in self.weights.copy()]
        changes = []
        for mine in snapshot:
            total = mine.clone()
            work = dist.all_reduce(total, group=self.group, async_op=True)
            while (
                mine.is_cuda and not work.is_completed()
            ):  # NCCL's wait would hold up the training's kernels, too
                time.sleep(0.001)
            work.wait()
            changes.append(total / self.size - mine)
        with self.lock:
            self.weights.add_unseen(changes)
        self.syncs += 1

    @staticmethod
    def _sent_as(tensor: torch.Tensor) -> torch.Tensor:
        """The host's copy of a virtual GPU's tensor: two threads' collectives would mix up its simulated time."""
        return tensor.cpu() if tensor.device.type == "vgpu" else tensor
