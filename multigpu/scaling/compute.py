"""What one GPU computes in a step, and when backward has which gradient.

The step runs once on one virtual GPU, with shapes only. The timeline gives the time of
forward, of backward and of the optimizer's step, and the time at which each gradient lies in
its bucket. As in DDP, each gradient is divided by the number of ranks into the bucket, and
after the all-reduce copied back. (Source: torch/csrc/distributed/c10d/reducer.cpp, functions
mark_variable_ready_dense and finalize_backward, without gradient_as_bucket_view.)
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from multigpu.errors import UserError
from multigpu.scaling.workloads import Workload
from multigpu.virtual import control
from multigpu.virtual.sim.event import Event
from multigpu.virtual.sim.presets import Gpu
from multigpu.virtual.sim.timeline import Timeline

# More than any GPU has: what does not fit is reported, and timed as if it did.
ROOM = 2**60
DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient, in the order of backward.

    name      of the parameter
    nbytes    its size
    ready     seconds after the start of backward at which it lies in its bucket
    copy_out  seconds to copy the average from the bucket to the gradient
    """

    name: str
    nbytes: int
    ready: float
    copy_out: float


@dataclass(frozen=True)
class Compute:
    """One step of one GPU with `samples` samples, without communication, in seconds.

    `backward` has the copies into the buckets in it, `copies_in` seconds. `memory` is the
    highest number of bytes.
    """

    samples: int
    forward: float
    backward: float
    update: float
    copies_in: float
    gradients: tuple[Gradient, ...]
    memory: int

    @property
    def alone(self) -> float:
        """Seconds of a step on a single GPU, which has no buckets."""
        return self.forward + self.backward - self.copies_in + self.update

    @property
    def copies(self) -> float:
        """Seconds of all copies into the buckets and out of them."""
        return self.copies_in + sum(gradient.copy_out for gradient in self.gradients)


def profile(
    workload: Workload,
    gpu: Gpu,
    batches: Iterable[int],
    precision: str = "fp32",
    slowdowns: Sequence[float] = (1.0,),
    layers: int | None = None,
) -> dict[int, list[Compute]]:
    """The step with each number of samples in `batches`, for each slowdown of its kernels.

    `precision` is a name in DTYPES: "fp16" and "bf16" compute with autocast, and the gradients
    stay in float32. `layers` is the number of equal layers, by default the workload's. Raises
    UserError for a step that needs more than ROOM bytes.
    """
    try:
        return _profile(workload, gpu, batches, DTYPES[precision], slowdowns, layers)
    except torch.OutOfMemoryError:
        raise UserError(
            f"{workload.name} needs more than 2^60 bytes on one GPU: give a smaller batch or "
            f"a smaller model."
        ) from None


def _profile(
    workload: Workload,
    gpu: Gpu,
    batches: Iterable[int],
    dtype: torch.dtype | None,
    slowdowns: Sequence[float],
    layers: int | None,
) -> dict[int, list[Compute]]:
    with control.running(1, gpu=gpu, memory=ROOM, compute=False) as (device,):
        with torch.device("meta"):
            model = workload.build(layers)
        model = model.to(device)
        optimizer = workload.optimizer(model)
        # The first step of an optimizer makes its state.
        for weight in model.parameters():
            weight.grad = torch.empty_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        bucket_views = {
            name: torch.empty_like(weight) for name, weight in model.named_parameters()
        }
        sizes = {name: view.nbytes for name, view in bucket_views.items()}
        steps = {}
        for samples in batches:
            torch.vgpu.reset_peak_memory_stats(device)
            timeline, order = _step(
                workload, model, optimizer, bucket_views, samples, device, dtype
            )
            memory = torch.vgpu.max_memory_allocated(device)
            steps[samples] = [
                _read(timeline, slowdown, sizes, order, samples, memory)
                for slowdown in slowdowns
            ]
        return steps


def _step(
    workload: Workload,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    bucket_views: dict[str, torch.Tensor],
    samples: int,
    device: torch.device,
    dtype: torch.dtype | None,
) -> tuple[Timeline, list[str]]:
    """One step; its timeline, and the parameters' names in the order of their gradients.

    The copies have notes: "in NAME" and "out NAME".
    """
    weights = dict(model.named_parameters())
    order: list[str] = []

    def into_bucket(name: str) -> None:
        order.append(name)
        with control.marked(f"in {name}"):
            torch.mul(weights[name].grad, 1.0, out=bucket_views[name])

    with ExitStack() as hooks:
        for name, weight in weights.items():
            hook = weight.register_post_accumulate_grad_hook(
                lambda _, name=name: into_bucket(name)
            )
            hooks.callback(hook.remove)
        began = control.elapsed()
        inputs = workload.inputs(samples, device)
        with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = workload.loss(model, inputs)
        loss.backward()
        for name in order:
            with control.marked(f"out {name}"):
                weights[name].grad.copy_(bucket_views[name])
        optimizer.step()
        optimizer.zero_grad()
    return control.timeline(since=began), order


def _read(
    timeline: Timeline,
    slowdown: float,
    sizes: dict[str, int],
    order: list[str],
    samples: int,
    memory: int,
) -> Compute:
    """The step's times from its timeline. An operation's time includes the wait before it."""
    ready: dict[str, float] = {}
    copy_out: dict[str, float] = {}
    copies_in = 0.0
    before = timeline.start
    forward_end = backward_end = update_start = None
    for event, end in slowed(timeline, slowdown):
        if event.phase == "backward" and forward_end is None:
            forward_end = before
        direction, _, name = timeline.notes.get(event, "").partition(" ")
        if direction == "in":
            ready[name] = end
            copies_in += end - before
        elif direction == "out":
            if backward_end is None:
                backward_end = before
            copy_out[name] = end - before
            update_start = end
        before = end
    gradients = tuple(
        Gradient(name, sizes[name], ready[name] - forward_end, copy_out[name])
        for name in order
    )
    return Compute(
        samples,
        forward=forward_end - timeline.start,
        backward=backward_end - forward_end,
        update=before - update_start,
        copies_in=copies_in,
        gradients=gradients,
        memory=memory,
    )


def slowed(timeline: Timeline, slowdown: float) -> Iterator[tuple[Event, float]]:
    """The timeline's events with their ends, if each takes `slowdown` times as long.

    The host launches operations as before. An operation that waited for its launch starts at
    its launch, or when the one before it ends if that is later. An operation that was launched
    in time follows the one before it at once. (With a slowdown below 1 the result is too fast
    where the host limits the speed.)
    """
    before = free = timeline.start
    for event in timeline.events:
        waited = event.start > before
        start = max(event.start, free) if waited else free
        before = event.end
        free = start + slowdown * (event.end - event.start)
        yield event, free
