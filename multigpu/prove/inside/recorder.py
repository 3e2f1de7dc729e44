"""Records each step of each optimizer, and ends the program after the last one.

torch calls public hooks before and after each step. What torch has no hook for is wrapped:
the call of a module, backward, clip_grad_norm_, DDP's forward, a scaler's step, DataLoaders.
"""

import functools
import os
import random
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, dataloader

from multigpu.prove.inside import ending, randomness
from multigpu.prove.inside.host import bare, number, numbers
from multigpu.prove.inside.parts import (
    Tracked,
    clean,
    of_dtensor,
    partial_ranks,
    placed_otherwise,
    track,
)
from multigpu.prove.inside.rows import needs_grad, outputs_of, rows_of, width_of
from multigpu.prove.record import IN_FUNCTION, SUFFIX, Head, Loader, Step, append
from multigpu.prove.settings import (
    DEFAULT_STEPS,
    LONGEST_EPOCH,
    SEED,
    STEPS_AFTER_EPOCH,
    Order,
    Settings,
)
from multigpu.prove.sketch import SUMS, sketch

TORCH = os.path.dirname(torch.__file__)
# Options of an optimizer's group that are no numbers of its rule.
NO_OPTIONS = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")
# So many elements of a frozen parameter tell whether it has changed.
SOME = 16
# The key of a hook of ours among an optimizer's own, which have numbers from 0.
LAST = -1


class Recorder:
    """The record of this process.

    modules     the outermost modules that the program has called
    without_grad  those that it has called under torch.no_grad: a teacher, or an evaluation
    busy        whether an outermost module, backward or this recorder runs
    pending     what has happened since the last step: the Step to be
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.folder = Path(settings.folder)
        # It keeps the order: a set has another one in each process.
        self.modules: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self.without_grad: weakref.WeakKeyDictionary[nn.Module, None] = (
            weakref.WeakKeyDictionary()
        )
        self.ddps: weakref.WeakSet[DDP] = weakref.WeakSet()
        self.optimizers: dict[int, _Optimizer] = {}
        self.busy = False
        self.calls_without_grad = 0
        self.in_backward = False
        # The libraries whose generator the program has seeded: names of _SEEDS.
        self.seeded: set[str] = set()
        self.reseeded = False
        self.loss_scale = 1.0
        self.attempts = 0
        self.loader: _Loader | None = None
        self.epoch_began: int | None = None
        self.pending = _empty_step()
        # As Step.gathered, since the last backward: what goes into no loss does not count.
        self.gathered: dict[str, int] = {}
        self.running: list[_Running] = []
        self.steps = 0
        # Whether the first optimizer has made its last step.
        self.over = False

    @functools.cached_property
    def path(self) -> Path:
        return self.folder / f"{ending.rank()}-{os.getpid()}{SUFFIX}"

    # ---- steps ---------------------------------------------------------------------------

    def put_last(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """Make before_step the last of the optimizer's hooks: they can change gradients."""
        hooks = optimizer._optimizer_step_pre_hooks
        hooks.pop(LAST, None)
        hooks[LAST] = self.before_step

    def before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> Any:
        """The hook before a step: record now, or after the closure that computes gradients."""
        if self.over and not self.running and self._known(optimizer).place == 0:
            ending.end(self.folder)
        given = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        self.running.append(_Running(optimizer))
        if len(self.running) == 1:
            self.running[0].multiply_rates(self.settings.rate)
        self.gathered = {}
        if not callable(given):
            self.at_step(optimizer)
            return None

        def closure(*more: Any, **keywords: Any) -> Any:
            result = given(*more, **keywords)
            running = self.running[-1]
            if not running.recorded:
                self.at_step(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def at_step(self, optimizer: Optimizer) -> None:
        """Record weights and gradients: those with which the optimizer computes its step.

        An optimizer that calls another one (ZeroRedundancyOptimizer, Horovod's) is recorded
        twice, and the second time counts: what it does before the call has happened then.
        """
        self.running[-1].recorded = True
        outer = self.running[0]
        known = self._known(outer.optimizer)
        if self.settings.disturb and outer.step is None:
            self._round_gradients(known)
        mine = known if optimizer is outer.optimizer else None
        scale = number(getattr(optimizer, "grad_scale", None) or 1.0)
        if outer.step is None:
            step = outer.step = self.pending
            self.pending = _empty_step()
            step.optimizer, step.number = known.place, known.steps
            known.steps += 1
            step.options = outer.options
            step.weights = np.stack([t.sketch(t.parameter) for t in known.tracked])
            step.gradients = np.zeros((len(known.tracked), SUMS))
            step.present = np.zeros(len(known.tracked), bool)
            step.buffers, step.frozen = known.buffer_sketches(), known.frozen_sketches()
            if known.local is not None:
                step.local, known.local = known.local, np.zeros_like(known.local)
            if self.loader is not None:
                step.loader, step.epoch = self.loader.facts, self.loader.epoch_of_step()
        step = outer.step
        wanted = None if mine is known else {id(p) for p in _parameters(optimizer)}
        for place, tracked in enumerate(known.tracked):
            parameter = tracked.parameter
            if wanted is not None and id(parameter) not in wanted:
                continue
            step.present[place] = parameter.grad is not None
            if parameter.grad is not None:
                gradient = parameter.grad
                if placed_otherwise(gradient, parameter):
                    tracked = of_dtensor(gradient, tracked.part.name)
                    step.placed[place] = tracked.part.shard
                    ranks = partial_ranks(gradient)
                    if ranks:
                        step.partial[place] = ranks
                step.gradients[place] = tracked.sketch(gradient) / scale

    def _round_gradients(self, known: "_Optimizer") -> None:
        """In a run that rounds otherwise: round as gradients are that travel in 16 bit."""
        modules = [module for outer in self.modules for module in outer.modules()]
        coarse = _coarse(self.ddps, modules)
        if not coarse:
            return
        generator = torch.Generator("cpu").manual_seed(
            SEED * self.settings.disturb + known.steps
        )
        with torch.no_grad():
            for tracked in known.tracked:
                if tracked.parameter.grad is not None:
                    gradient = bare(tracked.parameter.grad)
                    noise = torch.rand(gradient.shape, generator=generator, device="cpu") - 0.5
                    gradient.mul_(1 + noise.to(gradient) * coarse)

    def after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """The hook after a step: complete the record, and end the program after the last."""
        ended = self.running.pop()
        if self.running:
            return
        ended.put_rates_back()
        if ended.step is None:
            return
        step, known = ended.step, self._known(optimizer)
        step.after = np.stack([t.sketch(t.parameter) for t in known.tracked])
        if known.steps == 1:
            append(self.path, self._head(known))
        append(self.path, step)
        if known.place == 0:
            self.steps = known.steps
            self.over = self.steps >= self._last_step(step)
            # Another optimizer's step can belong to this one's last step, as in a GAN. After
            # the first step it is not known whether there is another.
            if self.over and self.steps > 1 and len(self.optimizers) == 1:
                ending.end(self.folder)

    def _last_step(self, step: Step) -> float:
        """The number of the step after which this program ends."""
        if self.settings.steps is not None:
            return self.settings.steps
        if step.epoch == 2 and self.epoch_began is None:
            self.epoch_began = self.steps - 1
        if self.epoch_began is not None:
            return max(self.epoch_began + STEPS_AFTER_EPOCH, STEPS_AFTER_EPOCH)
        length = self.loader.steps_per_epoch(self.steps) if self.loader else None
        return DEFAULT_STEPS if length is None or length > LONGEST_EPOCH else LONGEST_EPOCH + 2

    def _known(self, optimizer: Optimizer) -> "_Optimizer":
        known = self.optimizers.get(id(optimizer))
        if known is None:
            known = _Optimizer(
                len(self.optimizers), optimizer, self.modules, self.without_grad
            )
            for module in self.ddps:
                held = set(map(id, module.parameters()))
                for tracked in known.tracked:
                    tracked.part.in_ddp |= id(tracked.parameter) in held
            for tracked in known.tracked:
                tracked.part.hooked = bool(tracked.parameter._backward_hooks)
            self.optimizers[id(optimizer)] = known
            if self.settings.local:
                known.watch_local(lambda: self.loss_scale)
        return known

    def _head(self, known: "_Optimizer") -> Head:
        modules = [module for outer in self.modules for module in outer.modules()]
        norms = [
            f"{type(module).__name__} {clean(name)}".strip()
            for outer in self.modules
            for name, module in outer.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
            and not isinstance(module, nn.SyncBatchNorm)
            and module.training
        ]
        return Head(
            optimizer=known.place,
            kind=type(known.optimizer).__name__,
            rank=ending.rank(),
            world=ending.world(),
            parts=[tracked.part for tracked in known.tracked],
            buffers=known.buffer_names(),
            frozen=list(known.frozen),
            peers=_peers(self.ddps, modules),
            seeded="torch" in self.seeded,
            norms=norms,
            hooks=[_name(hook) for ddp in self.ddps for hook in _hooks(ddp)],
            coarse=_coarse(self.ddps, modules),
            uses_ddp=bool(self.ddps),
            gpus=_gpus(),
        )

    # ---- what happens between steps ------------------------------------------------------

    def forward(self, call: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The call of an outermost module: record its rows, and whether it draws."""
        if self.settings.no_dropout and module not in self.modules:
            randomness.keep_all(module)
        self.modules[module] = None
        self.busy = True
        try:
            rows = None
            # A loss has no parameters, and its labels are no rows.
            trained = next(module.parameters(), None) is not None
            if trained:
                rows = rows_of(args, kwargs)
            before = _random_states()
            result = call(module, *args, **kwargs)
            if rows is not None:
                self.pending.rows.append(rows)
                self.pending.widths.add(width_of(args, kwargs))
                self.pending.outputs.append(outputs_of(result, len(rows)))
            # What changes the data before the model, such as RandomCrop, changes rows.
            if (trained or needs_grad(args, kwargs)) and any(
                not torch.equal(*pair) for pair in zip(before, _random_states(), strict=True)
            ):
                self.pending.random += _random_modules(module)
            return result
        finally:
            self.busy = False

    def forward_without_grad(
        self, call: Callable, module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        """The call of a module, and of those within it, under torch.no_grad."""
        self.calls_without_grad += 1
        try:
            if self.calls_without_grad == 1:
                self.without_grad[module] = None
            return call(module, *args, **kwargs)
        finally:
            self.calls_without_grad -= 1

    def backward(self, original: Callable, tensors: Any, args: tuple, kwargs: dict) -> Any:
        """torch.autograd.backward: record the loss, and whether DDP synchronizes."""
        gradient = args[0] if args else kwargs.get("grad_tensors")
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        first = losses[0] if losses else None
        is_loss = isinstance(first, torch.Tensor) and first.numel() == 1
        if is_loss and gradient in (None, (), [None], (None,)) and not first.is_meta:
            self.pending.losses.append(number(first) / self.loss_scale)
            self.pending.made = _made(first)
        for kind, calls in self.gathered.items():
            self.pending.gathered[kind] = self.pending.gathered.get(kind, 0) + calls
        self.gathered = {}
        self.pending.backward_sync += [ddp.require_backward_grad_sync for ddp in self.ddps]
        before, self.in_backward = self.in_backward, True
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self.in_backward = before

    def seed(self) -> None:
        """Seed the program's random numbers, each rank with its own seed, unless it does so.

        Until its first optimizer all ranks have the same seed, so that models begin equal.
        """
        if self.reseeded:
            return
        self.reseeded = True
        for name, function in _SEEDS.items():
            if name not in self.seeded:
                function(SEED + ending.rank())


class _Running:
    """A step that has begun; an optimizer can call another one."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer
        self.step: Step | None = None
        self.recorded = False
        self.options = _options(optimizer)
        # For each group: the group, the program's learning rate, and the multiplied rate.
        self.rates: list[tuple[dict, Any, Any]] = []

    def multiply_rates(self, factor: float) -> None:
        """Multiply the learning rates, until put_rates_back."""
        for group in self.optimizer.param_groups if factor != 1 else ():
            rate = group.get("lr")
            if rate is not None:
                group["lr"] = rate * factor
                self.rates.append((group, rate, group["lr"]))

    def put_rates_back(self) -> None:
        """Put them back, but for those that the step itself has changed."""
        for group, rate, given in self.rates:
            if group["lr"] is given:
                group["lr"] = rate


class _Optimizer:
    """An optimizer and its parameters; the first one has the modules' buffers and frozen
    parameters, too.
    """

    def __init__(self, place: int, optimizer: Optimizer, modules: Any, without_grad: Any):
        self.place = place
        self.optimizer = optimizer
        self.steps = 0
        self.tracked: list[Tracked] = track(optimizer, modules)
        self.modules = list(modules) if place == 0 else []
        self.frozen = {} if place else _frozen([*self.modules, *without_grad])
        # For each: some of its elements, and the sketch of all. Most never change.
        self.frozen_before: dict[str, tuple[torch.Tensor, np.ndarray]] = {}
        self.local: np.ndarray | None = None

    def _buffers(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for place, module in enumerate(self.modules):
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point() and not hasattr(buffer, "_local_tensor"):
                    name = clean(name)
                    found[f"{place}.{name}" if name in found else name] = buffer
        return found

    def buffer_names(self) -> list[str]:
        return list(self._buffers())

    def buffer_sketches(self) -> np.ndarray:
        """The sketches of all floating-point buffers, (buffers, 64)."""
        found = [numbers(buffer).reshape(-1) for buffer in self._buffers().values()]
        rows = [sketch(values, values.numel()) for values in found]
        return np.stack(rows) if rows else np.zeros((0, SUMS))

    def frozen_sketches(self) -> np.ndarray:
        """The sketches of the frozen parameters, (frozen, 64)."""
        for name, parameter in self.frozen.items():
            values = numbers(parameter).reshape(-1)
            some = values[:: max(1, len(values) // SOME)].clone()
            before = self.frozen_before.get(name)
            if before is None or not torch.equal(before[0], some):
                self.frozen_before[name] = some, sketch(values, values.numel())
        rows = [row for _, row in self.frozen_before.values()]
        return np.stack(rows) if rows else np.zeros((0, SUMS))

    def watch_local(self, scale: Callable[[], float]) -> None:
        """Add up the gradients that backward computes, before anything averages them.

        They are divided by the loss scale that `scale` returns.
        """
        self.local = np.zeros((len(self.tracked), SUMS))

        def add(place: int, gradient: torch.Tensor) -> None:
            # Not in torch.autograd.grad, whose gradients nobody steps with.
            if _recorder is None or _recorder.in_backward:
                self.local[place] += self.tracked[place].sketch(gradient) / scale()

        for place, tracked in enumerate(self.tracked):
            if tracked.parameter.requires_grad:
                tracked.parameter.register_hook(functools.partial(add, place))


class _Loader:
    """A DataLoader: how many times its iteration has begun, and how many batches it gave."""

    def __init__(self, loader: DataLoader):
        self.begun = 0
        self.given = 0
        self.epochs = 0
        self.of_last_step = 0
        sampler = getattr(loader, "sampler", None)
        random_order = type(sampler).__name__ in ("RandomSampler", "SeedableRandomSampler")
        self.facts = Loader(
            sampler=type(sampler).__name__,
            shuffle=bool(getattr(sampler, "shuffle", random_order)),
            rows=_length(loader.dataset),
            batches=_length(loader),
            seed=getattr(sampler, "seed", 0),
        )

    def begin(self, loader: DataLoader, order: Order | None) -> None:
        """An iteration begins; in `order`, if it is one of this loader's rows."""
        self.begun += 1
        self.facts.set_epoch = getattr(getattr(loader, "sampler", None), "epoch", 0)
        batches = getattr(loader, "batch_sampler", None)
        ordered = order and (order.sampler, order.rows) == (
            self.facts.sampler,
            self.facts.rows,
        )
        if not ordered or not isinstance(batches, BatchSampler):
            return
        sampler = DistributedSampler(
            loader.dataset, 1, 0, shuffle=order.shuffle, seed=order.seed
        )
        later = max(0, self.epochs - len(order.epochs) + 1)
        sampler.set_epoch(order.epochs[min(self.epochs, len(order.epochs) - 1)] + later)
        batches.sampler = sampler

    def epoch_of_step(self) -> int:
        """The epoch of a step that is made now, from 1; iterations without steps are none."""
        if self.begun != self.of_last_step:
            self.epochs += 1
            self.of_last_step = self.begun
        return self.epochs

    def steps_per_epoch(self, steps: int) -> float | None:
        """The steps of an epoch, from the batches that `steps` steps took."""
        batches = self.facts.batches
        return batches * steps / self.given if batches and self.given else None


def _made(loss: torch.Tensor) -> list[str]:
    """The last operations that made a loss, the last one first."""
    names, node = [], loss.grad_fn
    while node is not None and len(names) < 8:
        reduction = {1: " mean", 2: " sum"}.get(getattr(node, "_saved_reduction", None), "")
        names.append(node.name() + reduction)
        node = node.next_functions[0][0] if node.next_functions else None
    return names


def _length(thing: Any) -> int | None:
    with suppress(TypeError, NotImplementedError, AttributeError):
        return len(thing)
    return None


def _frozen(modules: list[nn.Module]) -> dict[str, torch.Tensor]:
    """The parameters that need no gradient, by the module's type and their name."""
    found: dict[str, torch.Tensor] = {}
    for place, module in enumerate(dict.fromkeys(modules)):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad or hasattr(parameter, "_local_tensor"):
                continue
            name = f"{type(module).__name__} {clean(name)}"
            found[f"{place}. {name}" if name in found else name] = parameter
    return found


def _empty_step() -> Step:
    nothing = np.zeros((0, SUMS))
    return Step(0, 0, nothing, nothing, np.zeros(0, bool), [], nothing, nothing)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _options(optimizer: Optimizer) -> list[dict]:
    """The numbers of each group's rule: learning rate, momentum, weight decay, …"""
    groups = []
    for group in optimizer.param_groups:
        values = {}
        for name, value in group.items():
            if name in NO_OPTIONS:
                continue
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = number(value)
            if isinstance(value, bool | int | float | str):
                values[name] = value
            elif isinstance(value, list | tuple):
                for place, entry in enumerate(value):
                    if isinstance(entry, int | float):
                        values[f"{name}[{place}]"] = entry
        groups.append(values)
    return groups


def _hooks(ddp: DDP) -> list[Callable]:
    return [hook for hook, _ in getattr(ddp, "_prove_hooks", [])]


def _name(hook: Any) -> str:
    return getattr(hook, "__name__", type(hook).__name__)


def _coarse(ddps: Any, modules: list[nn.Module]) -> float:
    """Head.coarse."""
    names = {_name(hook) for ddp in ddps for hook in _hooks(ddp)}
    types = [
        dtype
        for start, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))
        if any(name.startswith(start) for name in names)
    ]
    for module in modules:
        policy = getattr(module, "mixed_precision", None)
        if hasattr(module, "_get_fsdp_state"):
            policy = getattr(module._get_fsdp_state(), "_mp_policy", None)
        dtype = getattr(policy, "reduce_dtype", None) or getattr(policy, "param_dtype", None)
        types += [dtype] if isinstance(dtype, torch.dtype) else []
    return max((torch.finfo(dtype).eps for dtype in types), default=0.0)


def _peers(ddps: Any, modules: list[nn.Module]) -> tuple[int, ...] | None:
    """The ranks that share this rank's data-parallel work: DDP's groups, FSDP's meshes."""
    groups = [ddp.process_group for ddp in ddps]
    for module in modules:
        if hasattr(module, "_get_fsdp_state"):
            group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)
            mesh = getattr(group, "mesh_info", None)
            groups += [
                getattr(mesh, name)
                for name in ("shard_process_group", "replicate_process_group")
                if getattr(mesh, name, None) is not None
            ]
        elif type(module).__name__ == "FullyShardedDataParallel":
            groups.append(module.process_group)
    if not groups:
        return None
    dist = torch.distributed
    ranks = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
    return tuple(sorted(ranks))


def _gpus() -> int:
    """The number of GPUs on which this process has had tensors."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    used = map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))
    return sum(nbytes > 0 for nbytes in used)


def _random_states() -> list[torch.Tensor]:
    """The states of the generators from which modules draw."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _random_modules(module: nn.Module) -> list[str]:
    names = [
        f"{type(inner).__name__} {clean(name)}".strip()
        for name, inner in module.named_modules()
        if inner.training and _drops(inner)
    ]
    return names or ["forward"]


def _drops(module: nn.Module) -> bool:
    """Whether a module in training drops something at random."""
    kind = type(module).__name__
    if isinstance(module, nn.RNNBase):
        return module.num_layers > 1 and module.dropout > 0
    share = getattr(module, "p", getattr(module, "drop_prob", 1))
    return ("Drop" in kind or kind == "StochasticDepth") and share != 0


# torch's own functions: those that programs call are replaced.
_SEEDS = {"torch": torch.manual_seed, "numpy": np.random.seed, "random": random.seed}
_recorder: Recorder | None = None


def has_trained() -> bool:
    """Whether this process has made a step."""
    return _recorder is not None and bool(_recorder.optimizers)


def start(settings: Settings) -> None:
    """Seed this process, and record its steps from now on."""
    global _recorder
    recorder = _recorder = Recorder(settings)
    for function in _SEEDS.values():
        function(SEED)
    register_optimizer_step_pre_hook(recorder.put_last)
    register_optimizer_step_post_hook(recorder.after_step)
    _wrap_modules(recorder)
    _wrap_backward(recorder)
    _wrap_ddp(recorder)
    if settings.one_gpu:
        _use_one_gpu()
    if settings.no_dropout:
        randomness.switch_dropout_off()
    randomness.seed_rows()
    _wrap_clipping(recorder)
    _wrap_scaler(recorder)
    _wrap_loaders(recorder, settings.batch_times, settings.order)
    _wrap_seeds(recorder)
    _wrap_collectives(recorder)
    ending.watch(recorder.folder, lambda: recorder.steps)
    os.register_at_fork(after_in_child=lambda: recorder.__dict__.pop("path", None))


def _replace(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    """Replace a function by make(function), which has its name and documentation."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _wrap_modules(recorder: Recorder) -> None:
    original = nn.Module.__call__
    compiling = torch.compiler.is_dynamo_compiling

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if compiling() or recorder.busy or recorder.in_backward:
            return original(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            return recorder.forward_without_grad(original, self, args, kwargs)
        return recorder.forward(original, self, args, kwargs)

    nn.Module.__call__ = __call__


def _wrap_backward(recorder: Recorder) -> None:
    def make(original: Callable) -> Callable:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return recorder.backward(original, tensors, args, kwargs)

        return backward

    _replace(torch.autograd, "backward", make)


def _wrap_ddp(recorder: Recorder) -> None:
    def make_init(original: Callable) -> Callable:
        def __init__(self: DDP, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            recorder.ddps.add(self)

        return __init__

    def make_forward(original: Callable) -> Callable:
        def forward(self: DDP, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                recorder.pending.forward_sync.append(self.require_backward_grad_sync)
            return original(self, *args, **kwargs)

        return forward

    def make_register(original: Callable) -> Callable:
        def register_comm_hook(self: DDP, state: object, hook: Callable) -> None:
            self.__dict__.setdefault("_prove_hooks", []).append((hook, state))
            return original(self, state, hook)

        return register_comm_hook

    _replace(DDP, "__init__", make_init)
    _replace(DDP, "forward", make_forward)
    _replace(DDP, "register_comm_hook", make_register)


def _use_one_gpu() -> None:
    """Let DataParallel, and the function data_parallel, use the first of their GPUs alone."""

    def make(original: Callable) -> Callable:
        def __init__(
            self: nn.Module,
            module: nn.Module,
            device_ids: Any = None,
            *more: Any,
            **keywords: Any,
        ) -> None:
            first = [0] if device_ids is None else list(device_ids)[:1]
            original(self, module, first, *more, **keywords)

        return __init__

    def on_one(original: Callable) -> Callable:
        def data_parallel(
            module: nn.Module, inputs: Any, device_ids: Any = None, *more: Any, **keywords: Any
        ) -> Any:
            first = [0] if device_ids is None else list(device_ids)[:1]
            return original(module, inputs, first, *more, **keywords)

        return data_parallel

    _replace(nn.DataParallel, "__init__", make)
    _replace(nn.parallel, "data_parallel", on_one)


def _wrap_clipping(recorder: Recorder) -> None:
    def make(original: Callable) -> Callable:
        def clip_grad_norm_(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            norm = original(parameters, max_norm, *args, **kwargs)
            # All ranks are here: the coefficient has needed the whole norm, too.
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            recorder.pending.norms.append((number(whole), number(max_norm)))
            return norm

        return clip_grad_norm_

    _replace(nn.utils, "clip_grad_norm_", make)
    nn.utils.clip_grad.clip_grad_norm_ = nn.utils.clip_grad_norm_


def _wrap_scaler(recorder: Recorder) -> None:
    from torch.amp import GradScaler

    def make_scale(original: Callable) -> Callable:
        def scale(self: GradScaler, outputs: Any) -> Any:
            scaled = original(self, outputs)
            recorder.loss_scale = self.get_scale() if self.is_enabled() else 1.0
            return scaled

        return scale

    def make_step(original: Callable) -> Callable:
        def _maybe_opt_step(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
            before = sum(known.steps for known in recorder.optimizers.values())
            result = original(self, *args, **kwargs)
            if sum(known.steps for known in recorder.optimizers.values()) == before:
                # No step: what was recorded for it is dropped.
                skipped = recorder.pending.skipped + 1
                recorder.pending = _empty_step()
                recorder.pending.skipped = skipped
                for known in recorder.optimizers.values():
                    if known.local is not None:
                        known.local[:] = 0
            return result

        return _maybe_opt_step

    _replace(GradScaler, "scale", make_scale)
    _replace(GradScaler, "_maybe_opt_step", make_step)


class _Enlarged(int):
    """A batch size that has been enlarged: Lightning makes loaders anew from their own."""

    @classmethod
    def of(cls, batch_size: int, times: int) -> int:
        """The enlarged batch size."""
        if times == 1 or isinstance(batch_size, cls):
            return batch_size
        return cls(batch_size * times)


def _wrap_loaders(recorder: Recorder, times: int, order: Order | None) -> None:
    known: weakref.WeakKeyDictionary[DataLoader, _Loader] = weakref.WeakKeyDictionary()

    def make_init(original: Callable) -> Callable:
        def __init__(
            self: DataLoader,
            dataset: Any,
            batch_size: int | None = 1,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            sampler = kwargs.get("batch_sampler", args[2] if len(args) > 2 else None)
            if isinstance(sampler, BatchSampler):
                sampler.batch_size = _Enlarged.of(sampler.batch_size, times)
            elif batch_size is not None and sampler is None:
                batch_size = _Enlarged.of(batch_size, times)
            original(self, dataset, batch_size, *args, **kwargs)

        return __init__

    def make_iter(original: Callable) -> Callable:
        def __iter__(self: DataLoader) -> Any:
            if self not in known:
                known[self] = _Loader(self)
            known[self].begin(self, order)
            iterator = original(self)
            with suppress(AttributeError):
                iterator._prove_loader = known[self]
            return iterator

        return __iter__

    def make_next(original: Callable) -> Callable:
        def __next__(self: Any) -> Any:
            batch = original(self)
            loader = getattr(self, "_prove_loader", None)
            if loader is not None and torch.is_grad_enabled():
                loader.given += 1
                recorder.loader = loader
            return batch

        return __next__

    _replace(DataLoader, "__init__", make_init)
    _replace(DataLoader, "__iter__", make_iter)
    _replace(dataloader._BaseDataLoaderIter, "__next__", make_next)


def _wrap_seeds(recorder: Recorder) -> None:
    def make(name: str) -> Callable[[Callable], Callable]:
        def wrap(original: Callable) -> Callable:
            def seed(*args: Any, **kwargs: Any) -> Any:
                # A worker of a DataLoader seeds itself in its own process.
                recorder.seeded.add(name)
                return original(*args, **kwargs)

            return seed

        return wrap

    def make_init(original: Callable) -> Callable:
        def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            recorder.seed()

        return __init__

    _replace(torch, "manual_seed", make("torch"))
    _replace(np.random, "seed", make("numpy"))
    _replace(random, "seed", make("random"))
    torch.random.manual_seed = torch.manual_seed
    _replace(Optimizer, "__init__", make_init)


def _in_function(frame: FrameType, name: str) -> str | None:
    """IN_FUNCTION if an autograd.Function of the program gathers in its forward."""
    if not name.startswith("all_gather"):
        return None
    for _ in range(4):
        if isinstance(frame.f_locals.get("ctx"), torch.autograd.function.FunctionCtx):
            return IN_FUNCTION
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _wrap_collectives(recorder: Recorder) -> None:
    """Count what the program gathers or reduces although it needs a gradient: these calls are
    not seen by autograd, but in a Function that has a backward of its own.
    """
    dist = torch.distributed
    if not dist.is_available():
        return

    def make(name: str) -> Callable[[Callable], Callable]:
        def wrap(original: Callable) -> Callable:
            def collective(*args: Any, **kwargs: Any) -> Any:
                caller = sys._getframe(1)
                differentiable = any(
                    isinstance(value, torch.Tensor) and value.requires_grad
                    for value in (*args, *kwargs.values())
                )
                if (
                    differentiable
                    and not recorder.in_backward
                    and not caller.f_code.co_filename.startswith(TORCH)
                ):
                    kind = name if torch.is_grad_enabled() else _in_function(caller, name)
                    if kind:
                        recorder.gathered[kind] = recorder.gathered.get(kind, 0) + 1
                return original(*args, **kwargs)

            return collective

        return wrap

    for name in ("all_gather", "all_gather_into_tensor", "all_reduce"):
        _replace(dist, name, make(name))
        setattr(dist.distributed_c10d, name, getattr(dist, name))
