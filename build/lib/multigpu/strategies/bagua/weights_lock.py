"""async's lock: the weights stay the same from before a forward to after its backward."""

import threading
from collections import deque

import torch
from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class FairLock:
    """A lock that threads get in the order in which they call `acquire`.

    threading.Lock has no order. A training loop releases the lock for some microseconds only,
    so with threading.Lock the averaging thread could wait forever. Any thread can call
    `release`, because autograd ends a backward on a GPU in a thread of its own.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        # The first one holds the lock.
        self._tickets: deque[object] = deque()

    def acquire(self) -> None:
        ticket = object()
        with self._condition:
            self._tickets.append(ticket)
            try:
                self._condition.wait_for(lambda: self._tickets[0] is ticket)
            except BaseException:  # for example KeyboardInterrupt
                self._tickets.remove(ticket)
                self._condition.notify_all()
                raise

    def release(self) -> None:
        with self._condition:
            self._tickets.popleft()
            self._condition.notify_all()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class TrainingLock:
    """Holds a FairLock while training reads or changes the weights.

    It acquires the lock before a forward with gradients, and releases it after the backward,
    as Bagua does. It also holds the lock during `optimizer.step()`. In manual optimization
    under the Trainer, the backward runs within the forward: the lock is then held until the
    end of this forward. After a forward without a backward, the lock is held until the next
    backward, `optimizer.step()` or `release`.
    """

    def __init__(self, lock: FairLock, model: nn.Module, optimizers: list[Optimizer]):
        self.lock = lock
        self.held = False
        self.forwards = 0  # 1 within a forward
        self.in_step = False
        self.used = False  # a backward or a step has ended since the lock was acquired
        self.callback_queued = False
        self.handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]
        for parameter in model.parameters():
            if parameter.requires_grad:
                self.handles.append(
                    parameter.register_post_accumulate_grad_hook(self._in_backward)
                )
        for optimizer in optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self._before_step))
            self.handles.append(optimizer.register_step_post_hook(self._after_step))

    def close(self) -> None:
        """Remove the hooks, and release the lock."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.release()

    def release(self) -> None:
        """Release the lock if it is held."""
        self.in_step = False
        self.forwards = 0
        if self.held:
            self.held = False
            self.lock.release()

    def _acquire(self) -> None:
        if not self.held:
            self.lock.acquire()
            self.held = True
            self.used = False

    def _release_after_use(self) -> None:
        self.used = True
        if not self.forwards and not self.in_step:
            self.release()

    def _before_forward(self, *_: object) -> None:
        # A backward that raised an error did not run its callback.
        self.callback_queued = False
        self.forwards += 1
        if torch.is_grad_enabled():
            self._acquire()

    def _after_forward(self, *_: object) -> None:
        self.forwards = max(0, self.forwards - 1)
        if self.used:
            self._release_after_use()

    def _in_backward(self, *_: object) -> None:
        if not self.callback_queued:
            self.callback_queued = True
            Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self.callback_queued = False
        self._release_after_use()

    def _before_step(self, *_: object) -> None:
        # If the last step raised an error, its post hook did not run: the lock is still held.
        self._acquire()
        self.in_step = True

    def _after_step(self, *_: object) -> None:
        self.in_step = False
        self._release_after_use()
