"""async's lock: when training holds it, and that threads get it in their order."""

import threading
import time

import pytest
import torch
from torch import nn

from multigpu.strategies.bagua.weights_lock import FairLock, TrainingLock


class Events(list):
    """Stands for the lock: it records what is called, in order."""

    def acquire(self) -> None:
        self.append("acquire")

    def release(self) -> None:
        self.append("release")


class Net(nn.Module):
    def __init__(self, events: Events):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.events = events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append("forward")
        return self.layer(x).square().mean()


class SGD(torch.optim.SGD):
    events: Events

    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.events.append("step")
        return super().step()


@pytest.fixture
def training():
    events = Events()
    model = Net(events)
    optimizer = SGD(model.parameters(), 0.1)
    optimizer.events = events
    lock = TrainingLock(events, model, [optimizer])
    yield events, model, optimizer, lock
    lock.close()


X = torch.ones(3, 2)


def test_it_is_held_from_before_forward_to_after_backward_and_in_the_step(training):
    events, model, optimizer, _ = training
    loss = model(X)
    events.append("between")
    loss.backward()
    events.append("clip")
    optimizer.step()
    assert events == [
        *("acquire", "forward", "between", "release"),
        "clip",
        *("acquire", "step", "release"),
    ]


def test_two_forwards_of_a_loss_are_held_together_and_micro_batches_apart(training):
    events, model, _, _ = training
    (model(X) + model(2 * X)).backward()
    model(X).backward()
    assert events == [
        *("acquire", "forward", "forward", "release"),
        *("acquire", "forward", "release"),
    ]


def test_a_forward_without_gradients_neither_takes_it_nor_gives_it_back(training):
    events, model, _, _ = training
    with torch.no_grad():
        model(X)
    loss = model(X)
    with torch.no_grad():
        model(X)
    loss.backward()
    assert events == ["forward", "acquire", "forward", "forward", "release"]


def test_a_closure_of_the_optimizer_is_within_the_step(training):
    events, model, optimizer, _ = training

    def closure():
        loss = model(X)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert events == ["acquire", "forward", "step", "release"]


def test_a_manual_step_within_the_forward_is_held_to_the_forwards_end():
    """So trains the Trainer in manual optimization: training_step runs in a forward."""
    events = Events()
    inner = Net(events)
    optimizer = SGD(inner.parameters(), 0.1)
    optimizer.events = events

    class Manual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self):
            for _ in range(2):
                self.inner(X).backward()
                optimizer.step()

    outer = Manual()
    lock = TrainingLock(events, outer, [optimizer])
    outer()
    assert events == ["acquire", "forward", "step", "forward", "step", "release"]
    lock.close()
    outer()
    assert events[6:] == ["forward", "step", "forward", "step"]


def test_after_an_error_the_next_step_gives_it_back(training):
    events, model, optimizer, lock = training
    loss = model(X)
    handle = model.layer.weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    model(X).backward()
    optimizer.step()
    assert events.count("acquire") == events.count("release") == 2
    model(X)
    lock.release()
    lock.release()
    assert events.count("acquire") == events.count("release") == 3


def test_threads_get_the_lock_in_the_order_in_which_they_ask():
    lock = FairLock()
    order = []

    def other():
        asks.set()
        with lock:
            order.append("other")

    for _ in range(20):
        asks = threading.Event()
        lock.acquire()
        thread = threading.Thread(target=other)
        thread.start()
        asks.wait()
        time.sleep(0.005)
        # The training loop gives the lock back and takes it again at once.
        lock.release()
        lock.acquire()
        order.append("training")
        lock.release()
        thread.join()
    assert order == ["other", "training"] * 20
