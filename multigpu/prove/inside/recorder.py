"""Records each step of each optimizer, and ends the program after the last one.

torch calls public hooks before and after each step. What torch has no hook for is replaced:
see replacing.py.
"""

import functools
import os
import random
import weakref
from collections.abc import Callable
from pathlib import Path
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

from multigpu.prove.inside import ending, facts, randomness, replacing
from multigpu.prove.inside.host import bare, number
from multigpu.prove.inside.loaders import Reading, wrap_loaders
from multigpu.prove.inside.optimizers import TrackedOptimizer, options_of, parameters_of
from multigpu.prove.inside.parts import clean, of_dtensor, partial_ranks, placed_otherwise
from multigpu.prove.inside.rows import needs_grad, outputs_of, rows_of, width_of
from multigpu.prove.record import COARSE, SUFFIX, Head, Step, append
from multigpu.prove.settings import (
    DEFAULT_STEPS,
    LONGEST_EPOCH,
    SEED,
    STEPS_AFTER_EPOCH,
    Settings,
)
from multigpu.prove.sketch import SUMS

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
        self.optimizers: dict[int, TrackedOptimizer] = {}
        self.busy = False
        self.calls_without_grad = 0
        self.in_backward = False
        # The libraries whose generator the program has seeded: names of _SEEDS.
        self.seeded: set[str] = set()
        self.reseeded = False
        self.loss_scale = 1.0
        # The loader that training reads, and the last one that was read under torch.no_grad.
        self.loader: Reading | None = None
        self.without_grad_read: Reading | None = None
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
        user_closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        self.running.append(_Running(optimizer))
        if len(self.running) == 1:
            self.running[0].multiply_rates(self.settings.rate)
        self.gathered = {}
        if not callable(user_closure):
            self.at_step(optimizer)
            return None

        def closure(*more: Any, **keywords: Any) -> Any:
            result = user_closure(*more, **keywords)
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
            step.moments = known.buffer_moments()
            if known.local is not None:
                step.local, known.local = known.local, np.zeros_like(known.local)
            if self.loader is not None:
                step.loader, step.epoch = self.loader.facts, self.loader.epoch_of_step()
        step = outer.step
        wanted = None if mine is known else {id(p) for p in parameters_of(optimizer)}
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

    def _round_gradients(self, known: TrackedOptimizer) -> None:
        """In a run that rounds otherwise: add noise to gradients that are in 16 bit, or are
        sent in 16 bit, of the size of their rounding errors.
        """
        modules = [module for outer in self.modules for module in outer.modules()]
        travel = facts.coarse(self.ddps, modules)
        generator = torch.Generator("cpu").manual_seed(
            SEED * self.settings.disturb + known.steps
        )
        with torch.no_grad():
            for tracked in known.tracked:
                eps = tracked.part.eps
                coarse = max(travel, eps if eps > COARSE else 0.0)
                if coarse and tracked.parameter.grad is not None:
                    gradient = bare(tracked.parameter.grad)
                    noise = torch.rand(gradient.shape, generator=generator, device="cpu") - 0.5
                    # In float32: 1 + noise in 16 bit would be 1, or have a bias.
                    factor = 1 + noise.to(gradient.device) * coarse
                    gradient.copy_(gradient * factor)

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

    def _known(self, optimizer: Optimizer) -> TrackedOptimizer:
        known = self.optimizers.get(id(optimizer))
        if known is None:
            known = TrackedOptimizer(
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
                known.watch_local(self)
        return known

    def _head(self, known: TrackedOptimizer) -> Head:
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
            peers=facts.peers(self.ddps, modules),
            seeded="torch" in self.seeded,
            norms=norms,
            hooks=[facts.name_of(hook) for ddp in self.ddps for hook in facts.hooks_of(ddp)],
            coarse=facts.coarse(self.ddps, modules),
            uses_ddp=bool(self.ddps),
            gpus=facts.gpus(),
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
            before = facts.random_states()
            result = call(module, *args, **kwargs)
            if rows is not None:
                if self.without_grad_read is not None:
                    self._trains(self.without_grad_read)
                self.pending.rows.append(rows)
                self.pending.widths.add(width_of(args, kwargs))
                self.pending.outputs.append(outputs_of(result, len(rows)))
            # What changes the data before the model, such as RandomCrop, changes rows.
            if (trained or needs_grad(args, kwargs)) and any(
                not torch.equal(*pair)
                for pair in zip(before, facts.random_states(), strict=True)
            ):
                self.pending.random += facts.random_modules(module)
            return result
        finally:
            self.busy = False

    def read(self, loader: Reading) -> None:
        """A loader gives a batch: to train, unless a forward without gradients follows."""
        if torch.is_grad_enabled():
            self._trains(loader)
        else:
            self.without_grad_read = loader

    def _trains(self, loader: Reading) -> None:
        loader.batches_read += 1
        self.loader, self.without_grad_read = loader, None

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
            self.pending.loss_eps = torch.finfo(first.dtype).eps
            self.pending.made = facts.made(first)
        for kind, calls in self.gathered.items():
            self.pending.gathered[kind] = self.pending.gathered.get(kind, 0) + calls
        self.gathered = {}
        self.pending.backward_sync += [ddp.require_backward_grad_sync for ddp in self.ddps]
        before, self.in_backward = self.in_backward, True
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self.in_backward = before

    def reduces(self, in_backward: list[torch.Tensor]) -> None:
        """Note a reduction in an optimizer's step, or one of a gradient before it.

        `in_backward` are the tensors, if the program reduces some of them into others.
        """
        if self.running and self.running[0].step is not None:
            self.running[0].step.reduces = True
        elif self.in_backward and in_backward:
            gradients = [p.grad for module in self.modules for p in module.parameters()]
            # Not the activations of sequence parallelism.
            self.pending.reduces |= any(
                tensor is gradient or (tensor._base is gradient is not None)
                for tensor in in_backward
                for gradient in gradients
            )

    def skip_step(self) -> None:
        """Drop what was recorded for a step that a loss scaler does not make."""
        skipped = self.pending.skipped + 1
        self.pending = _empty_step()
        self.pending.skipped = skipped
        for known in self.optimizers.values():
            if known.local is not None:
                known.local[:] = 0

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
        self.options = options_of(optimizer)
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
        """Restore the program's learning rates, except those that the step has changed."""
        for group, rate, multiplied in self.rates:
            if group["lr"] is multiplied:
                group["lr"] = rate


def _empty_step() -> Step:
    nothing = np.zeros((0, SUMS))
    return Step(0, 0, nothing, nothing, np.zeros(0, bool), [], nothing, nothing)


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
    replacing.wrap_modules(recorder)
    replacing.wrap_backward(recorder)
    replacing.wrap_ddp(recorder)
    if settings.one_gpu:
        replacing.use_one_gpu()
    if settings.no_dropout:
        randomness.switch_dropout_off()
    randomness.seed_rows()
    replacing.wrap_clipping(recorder)
    replacing.wrap_scaler(recorder)
    wrap_loaders(recorder, settings.batch_times, settings.order)
    replacing.wrap_seeds(recorder)
    replacing.wrap_collectives(recorder)
    ending.watch(recorder.folder, lambda: recorder.steps)
    os.register_at_fork(after_in_child=lambda: recorder.__dict__.pop("path", None))
