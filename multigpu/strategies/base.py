"""The interface of a strategy: which devices compute, what wraps the model, how ranks agree.

A strategy works with the Trainer and without it. Without the Trainer:

    strategy = BaguaStrategy(algorithm="bytegrad")
    strategy.connect()                                    # under torchrun, srun, mpirun, …
    model, optimizer = strategy.setup(model, optimizer)   # on its device, wrapped, hooked
    for images, labels in loader:                         # an ordinary loop
        images, labels = images.to(strategy.device), labels.to(strategy.device)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy.close()
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from multigpu.errors import UserError
from multigpu.launch.world import World, find_world
from multigpu.strategies.accelerators import Accelerator, resolve
from multigpu.strategies.gather import Gather, all_gather_stacked

Result = TypeVar("Result")


class Strategy:
    """The base class of all strategies: one process, which computes on `device`.

    name                    what the user writes: Trainer(strategy=name)
    device                  the device of this rank's batches; known after `connect`
    devices                 all devices of this process; known after `connect`
    world                   this process's rank and the number of ranks; known after `connect`
    backwards_per_step      `backward` calls before each step; set it before `setup`
    manual_optimization     True: the training step itself calls `before_backward` and then
                            `backward`, perhaps several times; set it before `setup`
    ranks_step_together     False if a rank does not wait for another one within an epoch; the
                            Trainer then makes no collective after a batch
    uses_several_nodes      True if ranks can be on several nodes
    supports_loss_scaling   True if a rank is allowed to skip a step, as loss scaling does
    """

    name = "strategy"
    # True after this process was one of several ranks. All strategies share it, because it
    # describes the process: after ddp, rank 0 is allowed to use a one-process strategy.
    has_been_rank = False
    backwards_per_step = 1
    manual_optimization = False
    supports_loss_scaling = True
    ranks_step_together = True
    uses_several_nodes = False

    def __init__(self) -> None:
        self.accelerator: Accelerator | None = None
        self.num_nodes = 1
        self.world = World()
        self.device = torch.device("cpu")
        self.devices: list[torch.device] = []

    # ---- processes and devices ------------------------------------------------------------

    def configure(self, accelerator: Accelerator, num_nodes: int = 1) -> None:
        """Set the devices and nodes.

        Raises UserError if this strategy cannot use them: one process has one node.
        """
        if num_nodes > 1 and not self.uses_several_nodes:
            raise UserError(
                f"{self.name} is one process on one machine, but num_nodes is {num_nodes}: "
                f"use 'ddp' or 'ddp2'."
            )
        self.accelerator = accelerator
        self.num_nodes = num_nodes

    def launch(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run `function(*args)` in all processes of the run. Returns rank 0's result."""
        return function(*args)

    @property
    def nodes(self) -> int:
        """The number of nodes on which the run's processes are."""
        return 1

    @property
    def root_device(self) -> torch.device:
        """Lightning's name for `device`."""
        return self.device

    def connect(self) -> None:
        """Find this process's rank and devices, and connect to the other ranks."""
        self.devices = self.own_devices()
        self.device = self.devices[0]

    def own_devices(self) -> list[torch.device]:
        """The devices of a one-process run.

        Raises UserError if a launcher started several processes.
        """
        self.accelerator = self.accelerator or resolve()
        launched = find_world()
        # After a run with several ranks, one rank is allowed to continue alone, often to test.
        if launched.size > 1 and not Strategy.has_been_rank:
            raise UserError(
                f"strategy {self.name!r} is one process, but {launched.launcher} has started "
                f"{launched.size}, and all would do the same: start one process, "
                f"or give strategy='ddp'.",
                already_reported=launched.rank != 0,
            )
        return self.accelerator.of_process(self.world)

    # ---- the model ------------------------------------------------------------------------

    def setup(
        self, model: nn.Module, *optimizers: Optimizer
    ) -> nn.Module | tuple[nn.Module | Optimizer, ...]:
        """Move `model` to its device and wrap it; add hooks to the optimizers.

        Returns (model, optimizer, …), or only the model if no optimizer is given. The
        optimizers must have the model's parameters. The parameters stay the same objects.
        """
        wrapped_optimizers = list(optimizers)
        wrapped = self.wrap(self.place(model), wrapped_optimizers)
        return (wrapped, *wrapped_optimizers) if wrapped_optimizers else wrapped

    def place(self, model: nn.Module) -> nn.Module:
        """Move the model to its device, before an optimizer gets its parameters."""
        return model.to(self.device)

    def wrap(self, model: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        """Return the module to call instead of `model`.

        `place` has moved `model` already. This method can replace optimizers in the list.
        """
        return model

    def wrap_for_evaluation(self, model: nn.Module) -> nn.Module:
        """Like `wrap`, for validation, test and prediction."""
        return model

    def start_epoch(self, model: nn.Module) -> None:
        """Called when a training epoch starts, with the module that `wrap` returned.

        Raises UserError if the set of trainable parameters has changed since `wrap`.
        """

    def scale_schedulers(self, schedulers: list[LRScheduler]) -> None:
        """Called after `wrap`: scale the schedulers if `wrap` scaled the learning rates."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager:
        """A context in which `backward` accumulates gradients without sending them.

        Use it for all backwards of a step except the last.
        """
        return nullcontext()

    def step_function(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """The function that runs the step called `name`, e.g. "training_step".

        model   the module that `wrap` returned; the step runs through it

        A loop asks for it once, not in each batch.
        """
        return partial(model, name)

    def before_backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        """In manual optimization: called before each `loss.backward()`."""

    def reduce_loss(self, output: Any) -> Any:
        """The loss of a step, from the model's output. In dp it has one loss per replica."""
        return output

    def synchronize(self, optimizer: Optimizer) -> None:
        """Called after a step's last `backward`: completes the gradients before clipping."""

    def optimizer_step_context(self, optimizer: Optimizer) -> AbstractContextManager:
        """The context in which `optimizer.step` runs after `synchronize`."""
        return nullcontext()

    def close(self) -> None:
        """End the run on all ranks: finish pending communication, then `detach`."""
        self.detach()

    def detach(self) -> None:
        """Remove all hooks from the model and its optimizers.

        It does not wait for other ranks, so a run that has failed can call it, too.
        """

    # ---- agreement between ranks ----------------------------------------------------------
    # Control messages are small and stay on the CPU. With NCCL they use a separate gloo group,
    # so no GPU waits for them.

    @property
    def control(self) -> dist.ProcessGroup | None:
        """The group for control messages; None if there is one process."""
        return None

    @property
    def is_global_zero(self) -> bool:
        return self.world.rank == 0

    @property
    def shard(self) -> tuple[int, int]:
        """(number of shards of the data set, index of this process's shard)."""
        return self.world.size, self.world.rank

    def barrier(self, name: str = "") -> None:
        """Wait until all ranks have reached this call. `name`, as in Lightning, is unused."""
        if self.control is not None:
            dist.barrier(self.control)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object on all ranks."""
        objects = [obj]
        if self.control is not None:
            dist.broadcast_object_list(objects, src, self.control)
        return objects[0]

    def gather_objects(self, obj: Any) -> list:
        """Return the objects of all ranks, in the order of the ranks, on all ranks."""
        if self.control is None:
            return [obj]
        objects: list = [None] * self.world.size
        dist.all_gather_object(objects, obj, self.control)
        return objects

    def all_reduce_max(self, numbers: list[int]) -> list[int]:
        """The maximum of each number over all ranks, by one all-reduce."""
        if self.control is None:
            return numbers
        tensor = torch.tensor(numbers)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, self.control)
        return tensor.tolist()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if the decision is true on all ranks; with all=False, on at least one."""
        if all:
            return not self.all_reduce_max([int(not decision)])[0]
        return bool(self.all_reduce_max([int(decision)])[0])

    def all_gather(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        sync_grads: bool = False,
    ) -> torch.Tensor:
        """Stack the tensors of all ranks (or of a group), all of one shape, to (ranks, …).

        With sync_grads, gradients flow back. They are summed over the ranks, because every
        rank's loss depends on the tensor.
        """
        if self.control is None:
            return tensor.unsqueeze(0)
        return Gather.apply(tensor, group) if sync_grads else all_gather_stacked(tensor, group)
