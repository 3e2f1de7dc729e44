"""What does a strategy decide? Who computes where, what is wrapped around the model, and how the ranks agree.

A strategy works with the Trainer, and without it:

    strategy = BaguaStrategy(algorithm="bytegrad")
    strategy.connect()                                    # under torchrun, srun, mpirun, horovodrun
    model, optimizer = strategy.setup(model, optimizer)   # on its device, wrapped, hooked
    for images, labels in loader:                         # a loop as any other
        F.cross_entropy(model(images.to(strategy.device)), labels.to(strategy.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy.close()
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.launch.world import World, find
from multigpu.strategies.accelerators import Accelerator, resolve
from multigpu.strategies.gather import Gather, stacked


class Strategy:
    """The base of all strategies: one process, which computes on `device`.

    name            what the user writes: Trainer(strategy=name)
    device          where this rank's batch goes; known after `connect`
    devices         all devices of this process
    world           this rank's place among all; known after `connect`
    backwards       how many times `backward` is called before each step; set it before `setup`
    manual          forward calls `backward` itself, each time after `before_backward`; set it before `setup`
    takes_float16   a gradient scaler may skip a step on one rank: can the strategy bear it?
    """

    name = "strategy"
    met = False  # have this process and others been ranks of one run?
    backwards = 1
    manual = False
    takes_float16 = True

    def __init__(self) -> None:
        self.accelerator: Accelerator | None = None
        self.num_nodes = 1
        self.world = World()
        self.device = torch.device("cpu")
        self.devices: list[torch.device] = []

    # ---- who computes where -------------------------------------------------------------------------------------

    def configure(self, accelerator: Accelerator, num_nodes: int = 1) -> None:
        """What the user asked for. Raises UserError where this strategy cannot do it."""
        self.accelerator, self.num_nodes = accelerator, num_nodes

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args)` in all processes of the run, and give back what it returns on rank 0."""
        return function(*args)

    @property
    def root_device(self) -> torch.device:
        """Lightning's name for `device`."""
        return self.device

    def connect(self) -> None:
        """Find this process's place and its device, and meet the other ranks."""
        self.devices = self.own_devices()
        self.device = self.devices[0]

    def own_devices(self) -> list[torch.device]:
        """The devices of a run that is one process. Raises UserError where a launcher has started several."""
        self.accelerator = self.accelerator or resolve()
        outer = find()
        if (
            outer.size > 1 and not Strategy.met
        ):  # else they may go on alone: rank 0 tests what all have trained
            raise UserError(
                f"strategy {self.name!r} is one process, and {outer.launcher} has started {outer.size}, which would all do the "
                f"same: start one, or give strategy='ddp'.",
                already_reported=outer.rank != 0,
            )
        return self.accelerator.of_process(self.world)

    # ---- the model ----------------------------------------------------------------------------------------------

    def setup(self, model: nn.Module, *optimizers: Optimizer) -> Any:
        """Move `model` to its device and wrap it; hook the optimizers. Gives (model, optimizer …), or the model alone.

        The optimizers must hold the model's parameters, which stay the same objects.
        """
        steppers = list(optimizers)
        wrapped = self.wrap(self.place(model), steppers)
        return (wrapped, *steppers) if steppers else wrapped

    def place(self, model: nn.Module) -> nn.Module:
        """The model on its device; before an optimizer is made of its parameters."""
        return model.to(self.device)

    def wrap(self, model: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        """What is called in the place of `model`, which `place` has placed. An optimizer in the list may be replaced."""
        return model

    def evaluated(self, model: nn.Module) -> nn.Module:
        """As `wrap`, where nothing will be learned."""
        return model

    def start_epoch(self, model: nn.Module) -> None:
        """A training epoch begins with what `wrap` gave. Raises UserError where that no longer fits the model."""

    def adapt(self, schedulers: list) -> None:
        """Learning-rate schedulers, after `wrap`: they must know if a strategy has changed the learning rates."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager:
        """Within it, `backward` adds up gradients and sends nothing: more pieces of the batch are to come."""
        return nullcontext()

    def run_step(self, model: nn.Module, name: str, *args: Any) -> Any:
        """One of the module's steps, by name, through what `wrap` gave."""
        return model(name, *args)

    def before_backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        """Where `manual` is set: the gradients of `loss` come next."""

    def merge(self, output: Any) -> Any:
        """The loss of a step, from what the model gave: dp gathers one from each replica."""
        return output

    def synchronize(self, optimizer: Optimizer) -> None:
        """After the last `backward` of a step the gradients are complete, so that they can be clipped."""

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager:
        """Around `optimizer.step`, once `synchronize` was called."""
        return nullcontext()

    def close(self) -> None:
        """The end, on all ranks: what they have begun together is finished, and what hangs on the model is taken off."""
        self.detach()

    def detach(self) -> None:
        """Take off what hangs on the model and its optimizers. It waits for nobody: a run that has failed calls it, too."""

    # ---- the ranks agree ----------------------------------------------------------------------------------------
    # Control messages are small and live on the CPU: with NCCL they have a group of gloo's, so that no GPU waits.

    @property
    def control(self) -> dist.ProcessGroup | None:
        """The group for control messages; None where there is one process."""
        return None

    @property
    def is_global_zero(self) -> bool:
        return self.world.rank == 0

    @property
    def shard(self) -> tuple[int, int]:
        """(parts, mine): into how many parts the data is dealt, and which this process takes."""
        return self.world.size, self.world.rank

    def barrier(self, name: str = "") -> None:
        """All ranks wait for each other."""
        if self.control is not None:
            dist.barrier(self.control)

    def broadcast(self, thing: Any, src: int = 0) -> Any:
        """Rank `src`'s object, on all ranks."""
        box = [thing]
        if self.control is not None:
            dist.broadcast_object_list(box, src, self.control)
        return box[0]

    def gather_objects(self, thing: Any) -> list:
        """What every rank gave, by rank, on all ranks."""
        if self.control is None:
            return [thing]
        told: list = [None] * self.world.size
        dist.all_gather_object(told, thing, self.control)
        return told

    def largest(self, numbers: list[int]) -> list[int]:
        """The largest of each number over all ranks: one all-reduce."""
        if self.control is None:
            return numbers
        tensor = torch.tensor(numbers)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, self.control)
        return tensor.tolist()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if all ranks say so; with all=False, if one does."""
        return (
            not self.largest([int(not decision)])[0]
            if all
            else bool(self.largest([int(decision)])[0])
        )

    def reduce(self, tensor: torch.Tensor, reduce_op: str = "mean") -> torch.Tensor:
        """The mean (or sum, max, min) of a tensor over all ranks, on all ranks; a new tensor."""
        if self.control is None:
            return tensor
        result = tensor.detach().clone()
        kind = {"mean": "SUM", "avg": "SUM", "sum": "SUM", "max": "MAX", "min": "MIN"}[
            reduce_op.lower()
        ]
        dist.all_reduce(result, getattr(dist.ReduceOp, kind))
        return result / self.world.size if reduce_op.lower() in ("mean", "avg") else result

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """The tensors of one shape of all ranks, or of a group's, stacked: (ranks, …). With sync_grads gradients flow back.

        They are summed over the ranks, whose losses all depend on the tensor.
        """
        if self.control is None:
            return tensor.unsqueeze(0)
        return Gather.apply(tensor, group) if sync_grads else stacked(tensor, group)
