"""DistributedOptimizer: an optimizer whose step applies gradients averaged over the ranks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.strategies.horovod.averages import Averages
from multigpu.strategies.horovod.compression import Compression
from multigpu.strategies.horovod.process import size


class _Averaging:
    """The methods that DistributedOptimizer adds to an optimizer's class."""

    def synchronize(self) -> None:
        """Wait until all gradients are averaged.

        A parameter that has no gradient on this rank counts as zeros, as in Horovod.
        """
        self._averaging.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step()` does not average again.

        Use it if you clip the gradients after `synchronize()`.
        """
        self._averaging.skip = True
        try:
            yield
        finally:
            self._averaging.skip = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as in torch. Raises UserError while gradients are averaged."""
        if self._averaging.running:
            raise UserError(
                "zero_grad() came between backward() and step(), while gradients are being "
                "averaged: call it after step()."
            )
        super().zero_grad(set_to_none)
        self._averaging.reset()


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Callable[[torch.Tensor], torch.Tensor] = Compression.none,
    backward_passes_per_step: int = 1,
) -> Optimizer:
    """Make `optimizer.step()` apply gradients that are averaged over the ranks.

    Returns the same object. As in Horovod, it gets a new class with two more methods,
    `synchronize` and `skip_synchronize`. Schedulers, state_dict and all references to the
    optimizer therefore still work. The averaging starts during the last of
    `backward_passes_per_step` backwards. The gradients of these backwards are summed, so
    divide the loss yourself.

    With a GradScaler, call `optimizer.synchronize(); scaler.unscale_(optimizer); with
    optimizer.skip_synchronize(): scaler.step(optimizer)`, because the scaler must get the
    averages.

    Raises UserError before `init`, and if two names are equal or a parameter has no name.
    """
    # Raises UserError if `init` was not called, because each rank would train alone.
    size()
    if isinstance(optimizer, _Averaging):
        raise UserError("this optimizer is a DistributedOptimizer already: wrap it once.")
    if backward_passes_per_step < 1:
        raise UserError(
            f"backward_passes_per_step is {backward_passes_per_step}: expected 1 or more."
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is not None:
        parameters = _in_order_of_names(list(named_parameters), parameters)
    original = type(optimizer)
    optimizer.__class__ = type(
        original.__name__, (_Averaging, original), {"__module__": original.__module__}
    )
    optimizer._averaging = Averages(parameters, compression, backward_passes_per_step)
    optimizer._averaging.step_hook = optimizer.register_step_pre_hook(
        lambda *_: optimizer._averaging.before_step()
    )
    return optimizer


def remove_averaging(optimizer: Optimizer) -> None:
    """Restore the optimizer's class and remove its hooks. It can then be wrapped again."""
    if isinstance(optimizer, _Averaging):
        optimizer._averaging.close()
        # __mro__ is: the class that DistributedOptimizer made, _Averaging, the original class.
        optimizer.__class__ = type(optimizer).__mro__[2]
        del optimizer._averaging


def _in_order_of_names(
    named: list[tuple[str, torch.Tensor]], owned: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The optimizer's parameters in the order of the names."""
    names = [name for name, _ in named]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"named_parameters has the name {duplicates[0]!r} twice: each name must be unique."
        )
    known = dict.fromkeys(parameter for _, parameter in named)
    if unnamed := [tuple(p.shape) for p in owned if p not in known]:
        raise UserError(
            f"named_parameters leaves out {len(unnamed)} of the optimizer's parameters "
            f"(the first has shape {unnamed[0]}): "
            f"give model.named_parameters() of the whole model, or leave named_parameters out."
        )
    in_optimizer = set(owned)
    return [parameter for parameter in known if parameter in in_optimizer]
