"""Backward runs on the streams of the forward operations, as in PyTorch."""

import pytest
import torch
from compare_devices import last
from torch.utils.checkpoint import checkpoint

from multigpu.virtual import control
from multigpu.virtual.sim.clock import Event

MEGABYTE = 250_000


def weight(device: torch.device) -> torch.Tensor:
    return torch.ones(MEGABYTE, device=device, requires_grad=True)


def backward(since: float = 0.0, kind: str = "compute") -> list[Event]:
    events = control.timeline(since).events
    return [event for event in events if (event.phase, event.kind) == ("backward", kind)]


def test_each_operation_of_backward_is_on_its_forward_stream(gpus):
    first, _ = gpus
    own, side = torch.vgpu.current_stream(first), torch.vgpu.Stream(first)
    v, w = weight(first), weight(first)
    with side:
        x = w * 2
        x = x.exp()
    own.wait_stream(side)
    y = (x * v.sin()).square().sum()
    seen = []
    x.register_hook(lambda grad: seen.append(torch.vgpu.current_stream(first)))
    v.register_hook(lambda grad: seen.append(torch.vgpu.current_stream(first)))
    y.backward()
    assert torch.vgpu.current_stream(first) == own and set(seen) == {own, side}
    streams = {}
    for event in backward():
        streams.setdefault(event.stream, []).append(event.name)
    assert streams[side.stream_id] == ["mul", "mul"], "of exp, and of w * 2"
    assert "cos" in streams[own.stream_id]


def test_a_stream_of_backward_waits_for_its_gradient(gpus):
    first, _ = gpus
    side = torch.vgpu.Stream(first)
    w = weight(first)
    x = w * 2
    side.wait_stream(torch.vgpu.current_stream(first))
    start = control.elapsed()
    with side:
        # The upload lets the side stream's work of forward end late.
        late = torch.zeros(10 * MEGABYTE).pin_memory().to(first, non_blocking=True)
        y = x * 3
    assert last().start >= last("transfer").end and late.device == first
    torch.vgpu.current_stream(first).wait_stream(side)
    y.backward(torch.ones_like(y))
    w.grad.add_(1)
    by_side, by_own = backward(start)
    assert (by_side.stream, by_own.stream) == (side.stream_id, 0)
    assert by_own.start == by_side.end
    assert last().start == by_own.end


def test_backward_waits_for_its_caller_and_its_caller_for_it(gpus):
    """Transfers show it: they do not wait for the SMs, as all kernels do."""
    first, second = gpus
    sides = [torch.vgpu.Stream(device) for device in gpus]
    w = weight(first)
    with torch.vgpu.stream(sides[0]), torch.vgpu.stream(sides[1]):
        there = w.to(second)
    gradient = torch.zeros(10 * MEGABYTE).pin_memory()
    torch.vgpu.synchronize()
    gradient = gradient.to(second, non_blocking=True)[:MEGABYTE]
    upload = last("transfer")
    there.backward(gradient)
    copy = last("transfer")
    assert copy.stream == sides[1].stream_id
    assert copy.start == upload.end, "the caller's stream has made the first gradient"
    w.grad.add_(1)
    assert last().start == copy.end, "the caller's stream has the last gradient"


def test_the_backward_of_a_copy_overlaps_with_the_computation(gpus):
    """A copy on side streams: the gradient of the second batch travels while the first batch's
    backward computes."""
    first, second = gpus
    sides = [torch.vgpu.Stream(device) for device in gpus]
    w = weight(first)
    outs = []
    for _ in range(2):
        x = w * 2
        sides[0].wait_stream(torch.vgpu.current_stream(first))
        with torch.vgpu.stream(sides[0]), torch.vgpu.stream(sides[1]):
            there = x.to(second)
        torch.vgpu.current_stream(second).wait_stream(sides[1])
        outs.append((there * 3).exp())
    start = control.elapsed()
    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    copies = backward(start, "transfer")
    kernels = [event for event in backward(start) if event.device == 1]
    assert len(copies) == 2 and len(kernels) == 4
    assert copies[0].stream == sides[1].stream_id
    assert copies[0].start >= kernels[1].end, "the copy waits for its gradient"
    assert kernels[2].start < copies[0].end, "the next batch's backward does not wait for it"
    last_of_first = [event for event in backward(start) if event.device == 0][-1]
    assert last_of_first.start >= copies[1].end


def test_callbacks_at_the_end_of_backward_are_on_the_callers_stream(gpus):
    """FSDP ends its communication in such a callback."""
    first, _ = gpus
    side = torch.vgpu.Stream(first)
    w = weight(first)
    with side:
        x = w.exp()
    y = x.sum()
    seen = []

    def callback() -> None:
        w.grad.add_(1)
        seen.append(torch.vgpu.current_stream(first))

    engine = torch.autograd.Variable._execution_engine
    x.register_hook(lambda grad: engine.queue_callback(callback))
    y.backward()
    assert seen == [torch.vgpu.default_stream(first)]
    of_exp, of_callback = backward()
    assert of_exp.stream == side.stream_id and of_callback.start >= of_exp.end


def test_checkpointing_and_second_derivatives(gpus):
    """Backward within backward: the numbers are right, and the streams are restored."""
    first, _ = gpus
    side = torch.vgpu.Stream(first)
    for reentrant in (True, False):
        w = weight(first)
        with side:
            x = checkpoint(lambda w: w.sin().exp(), w, use_reentrant=reentrant)
        torch.vgpu.current_stream(first).wait_stream(side)
        start = control.elapsed()
        (x * 2).sum().backward()
        expected = 2 * torch.ones(1).sin().exp() * torch.ones(1).cos()
        assert w.grad[0].item() == pytest.approx(expected.item())
        assert torch.vgpu.current_stream(first) == torch.vgpu.default_stream(first)
        streams = {event.name: event.stream for event in backward(start)}
        assert streams["cos"] == streams["exp"] == side.stream_id
    w = weight(first)
    with side:
        (grad,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
    start = control.elapsed()
    grad.sum().backward()
    assert w.grad[0].item() == pytest.approx(6)
    assert {event.stream for event in backward(start)} == {side.stream_id}


def test_an_error_in_backward_restores_the_streams(gpus):
    first, _ = gpus
    w = weight(first)
    with torch.vgpu.Stream(first):
        x = w.exp()

    def hook(grad: torch.Tensor) -> None:
        raise ArithmeticError("in a hook")

    x.register_hook(hook)
    with pytest.raises(ArithmeticError):
        x.sum().backward()
    assert torch.vgpu.current_stream(first) == torch.vgpu.default_stream(first)
