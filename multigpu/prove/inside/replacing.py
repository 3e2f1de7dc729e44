"""What torch has no hook for: functions of torch that are replaced by others around them."""

import functools
import os
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import Optimizer

from multigpu.prove.inside.host import number
from multigpu.prove.record import IN_FUNCTION

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
TORCH = os.path.dirname(torch.__file__)


def replace(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    """Replace a function by make(function), which has its name and documentation."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def wrap_modules(recorder: Any) -> None:
    original = nn.Module.__call__
    compiling = torch.compiler.is_dynamo_compiling

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if compiling() or recorder.busy or recorder.in_backward:
            return original(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            return recorder.forward_without_grad(original, self, args, kwargs)
        return recorder.forward(original, self, args, kwargs)

    nn.Module.__call__ = __call__


def wrap_backward(recorder: Any) -> None:
    def make(original: Callable) -> Callable:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return recorder.backward(original, tensors, args, kwargs)

        return backward

    replace(torch.autograd, "backward", make)


def wrap_ddp(recorder: Any) -> None:
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

    replace(DDP, "__init__", make_init)
    replace(DDP, "forward", make_forward)
    replace(DDP, "register_comm_hook", make_register)


def use_one_gpu() -> None:
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

    replace(nn.DataParallel, "__init__", make)
    replace(nn.parallel, "data_parallel", on_one)


def wrap_clipping(recorder: Any) -> None:
    def make(original: Callable) -> Callable:
        def clip_grad_norm_(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
            norm = original(parameters, max_norm, *args, **kwargs)
            # full_tensor is a collective, and all ranks make it: the clipping needed one, too.
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            recorder.pending.norms.append((number(whole), number(max_norm)))
            return norm

        return clip_grad_norm_

    replace(nn.utils, "clip_grad_norm_", make)
    nn.utils.clip_grad.clip_grad_norm_ = nn.utils.clip_grad_norm_


def wrap_scaler(recorder: Any) -> None:
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
                recorder.skip_step()
            return result

        return _maybe_opt_step

    replace(GradScaler, "scale", make_scale)
    replace(GradScaler, "_maybe_opt_step", make_step)


def wrap_seeds(recorder: Any) -> None:
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

    replace(torch, "manual_seed", make("torch"))
    replace(np.random, "seed", make("numpy"))
    replace(random, "seed", make("random"))
    torch.random.manual_seed = torch.manual_seed
    replace(Optimizer, "__init__", make_init)


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


def wrap_collectives(recorder: Any) -> None:
    """Count what the program gathers or reduces although it needs a gradient: these calls are
    not seen by autograd, but in a Function that has a backward of its own. Note which steps
    of optimizers reduce tensors.
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

    def noting(name: str) -> Callable[[Callable], Callable]:
        def wrap(original: Callable) -> Callable:
            def reduction(*args: Any, **kwargs: Any) -> Any:
                tensors = [
                    value
                    for value in (*args, *kwargs.values())
                    if isinstance(value, torch.Tensor)
                ]
                # One number is a norm, or whether a gradient is infinite.
                if any(tensor.numel() > 1 for tensor in tensors):
                    by_program = not sys._getframe(1).f_code.co_filename.startswith(TORCH)
                    # An all-reduce in a hook changes the gradient itself.
                    elsewhere = by_program and name.startswith("reduce_scatter")
                    recorder.reduces(tensors if elsewhere else [])
                return original(*args, **kwargs)

            return reduction

        return wrap

    for name in REDUCTIONS:
        replace(dist, name, noting(name))
        setattr(dist.distributed_c10d, name, getattr(dist, name))
    for name in ("all_gather", "all_gather_into_tensor", "all_reduce"):
        replace(dist, name, make(name))
        setattr(dist.distributed_c10d, name, getattr(dist, name))
