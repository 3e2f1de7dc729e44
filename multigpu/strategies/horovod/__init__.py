"""What is Horovod? Each gradient is averaged over the ranks as soon as it is ready, and `step()` waits for all of them.

The course's own, in the shape of horovod.torch, on torch.distributed:

    from multigpu.strategies import horovod as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""

import atexit
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from multigpu import devices, rendezvous
from multigpu.errors import UserError
from multigpu.launch import world
from multigpu.strategies.horovod.averages import Averages, Compression
from multigpu.strategies.weights import ranks

_place: world.World | None = None


def init() -> None:
    """Find this process's rank and device, and meet the others. Where torch.distributed runs already, take that.

    The device is cuda:local_rank, which is made current, or the CPU.
    """
    global _place
    found = world.find()
    if not dist.is_initialized():
        device = devices.pick(found)
        store = rendezvous.meet(found, device)
        dist.init_process_group(
            devices.backend(device), store=store, rank=found.rank, world_size=found.size
        )
        atexit.register(shutdown)
    _place = found


def shutdown() -> None:
    """End what `init` has begun."""
    global _place
    if dist.is_initialized():
        dist.destroy_process_group()
    _place = None


def _placed() -> world.World:
    if _place is None:
        raise UserError("Horovod has not been started: call init() first.")
    return _place


def size() -> int:
    """The number of ranks."""
    _placed()
    return ranks()


def rank() -> int:
    """This process's number, from 0 on."""
    _placed()
    return dist.get_rank()


def local_rank() -> int:
    """Its number on this node, which picks the GPU."""
    return _placed().local_rank


def local_size() -> int:
    """The number of ranks on this node."""
    return _placed().local_size


def allreduce(tensor: torch.Tensor, average: bool = True) -> torch.Tensor:
    """The mean over the ranks, or the sum: a new tensor. Raises UserError for a mean of whole numbers."""
    if average and not tensor.is_floating_point():
        raise UserError(
            f"a mean of {tensor.dtype} is no whole number: give average=False, or a floating-point tensor."
        )
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if size() > 1:
        dist.all_reduce(result, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
    return result


def allgather(tensor: torch.Tensor) -> torch.Tensor:
    """The ranks' tensors, one after the other along dimension 0, in which they may differ: (Σ rows, …)."""
    rows = torch.tensor([len(tensor)], device=tensor.device)
    counts = [torch.empty_like(rows) for _ in range(size())]
    dist.all_gather(counts, rows)
    counts = [int(count) for count in counts]
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(tensor)] = tensor.detach()
    pieces = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(pieces, padded)
    return torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])


def broadcast(tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
    """Rank root_rank's tensor: a new one on each rank."""
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if size() > 1:
        dist.broadcast(result, root_rank)
    return result


@torch.no_grad()
def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], root_rank: int = 0
) -> None:
    """Overwrite the tensors with rank root_rank's. `params` is a model's state_dict() or its named_parameters()."""
    named = params.items() if isinstance(params, Mapping) else params
    for _, tensor in sorted(named, key=lambda pair: pair[0]):
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(broadcast(tensor, root_rank))


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0) -> None:
    """Give all ranks the state and the settings of rank root_rank's optimizer. Only that one needs to have a state yet."""
    if size() == 1:
        return
    told = [devices.on_the_cpu(optimizer.state_dict()) if rank() == root_rank else None]
    dist.broadcast_object_list(told, root_rank)
    optimizer.load_state_dict(told[0])  # which takes each tensor to its parameter's device


class _Averaging:
    """What DistributedOptimizer adds to an optimizer's class."""

    def synchronize(self) -> None:
        """Wait until all gradients are averaged. A parameter without one on this rank counts as zeros, as in Horovod."""
        self._averaging.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step()` in this block does not average again: for gradients that were clipped after `synchronize()`."""
        self._averaging.skip = True
        try:
            yield
        finally:
            self._averaging.skip = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._averaging.running:
            raise UserError(
                "zero_grad() came between backward() and step(), while gradients are on their way: call it after step()."
            )
        super().zero_grad(set_to_none)
        self._averaging.forget()


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Callable[[torch.Tensor], torch.Tensor] = Compression.none,
    backward_passes_per_step: int = 1,
) -> Optimizer:
    """The same optimizer, whose `step()` applies gradients that are averaged over the ranks.

    As Horovod does, it gives the object a class made of its own and two more methods, `synchronize` and `skip_synchronize`:
    schedulers, state_dict and what knows the optimizer already go on working. The averages start during the last of
    `backward_passes_per_step` backwards; the gradients of these add up, so divide the loss yourself.

    With a GradScaler: `optimizer.synchronize(); scaler.unscale_(optimizer); with optimizer.skip_synchronize():
    scaler.step(optimizer)`, since the scaler must see the averages.

    Raises UserError before `init`, and where names are given twice or leave a parameter of the optimizer out.
    """
    size()  # where `init` was forgotten, each rank would train alone
    if isinstance(optimizer, _Averaging):
        raise UserError("this optimizer is a DistributedOptimizer already: wrap it once.")
    if backward_passes_per_step < 1:
        raise UserError(
            f"backward_passes_per_step is {backward_passes_per_step}: it is 1 or more."
        )
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is not None:
        owned = _in_order(list(named_parameters), owned)
    kind = type(optimizer)
    optimizer.__class__ = type(
        kind.__name__, (_Averaging, kind), {"__module__": kind.__module__}
    )
    optimizer._averaging = Averages(owned, compression, backward_passes_per_step)
    optimizer._averaging.step_hook = optimizer.register_step_pre_hook(
        lambda *_: optimizer._averaging.before_step()
    )
    return optimizer


def undo(optimizer: Optimizer) -> None:
    """The optimizer as it was before DistributedOptimizer, which may then take it again."""
    if isinstance(optimizer, _Averaging):
        optimizer._averaging.close()
        optimizer._averaging.step_hook.remove()
        optimizer.__class__ = type(optimizer).__mro__[2]  # (made here, _Averaging, its own)
        del optimizer._averaging


def _in_order(
    named: list[tuple[str, torch.Tensor]], owned: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The optimizer's parameters in the order of the names."""
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"named_parameters has the name {twice[0]!r} twice: names tell the parameters apart."
        )
    known = dict.fromkeys(p for _, p in named)
    if unnamed := [tuple(p.shape) for p in owned if p not in known]:
        raise UserError(
            f"named_parameters leaves out {len(unnamed)} of the optimizer's parameters (the first has shape {unnamed[0]}): "
            f"give model.named_parameters() of the whole model, or nothing."
        )
    mine = set(owned)
    return [p for p in known if p in mine]
