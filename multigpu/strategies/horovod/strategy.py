"""horovod: each gradient is averaged as soon as it is ready, and the learning rate is scaled.

    multigpu horovodrun -np 4 python train.py

If the package `horovod` can be imported, it is used. Otherwise the course's own Horovod is
used.
"""

from contextlib import AbstractContextManager
from datetime import timedelta
from types import ModuleType

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from multigpu.errors import UserError
from multigpu.strategies import horovod as course_horovod
from multigpu.strategies.ddp import DDPStrategy, trainable_parameters
from multigpu.strategies.horovod.optimizer import remove_averaging

# The learning rates and their bounds. OneCycleLR keeps them in the parameter groups; CyclicLR,
# the cosine schedulers and ReduceLROnPlateau keep them in attributes.
GROUP_KEYS = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr"}
SCHEDULER_ATTRIBUTES = ("base_lrs", "max_lrs", "eta_min", "min_lrs", "_last_lr")


def package() -> ModuleType:
    """`horovod.torch` if it can be imported, else the course's own module."""
    try:
        import horovod.torch as real
    except ImportError:
        return course_horovod
    return real


class HorovodStrategy(DDPStrategy):
    """One process per device, started by horovodrun, mpirun, srun or torchrun.

    The learning rates of optimizers and schedulers are multiplied by the number of ranks, as
    Lightning's strategy did. To get the same numbers as ddp, divide the learning rate by the
    number of ranks, or give scale_learning_rate=False.
    """

    name = "horovod"

    def __init__(
        self,
        scale_learning_rate: bool = True,
        fp16_compression: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ):
        super().__init__(process_group_backend, timeout)
        self.scale_learning_rate = scale_learning_rate
        self.fp16_compression = fp16_compression
        # The optimizers that `wrap` has wrapped.
        self.wrapped_optimizers: list[Optimizer] = []

    def ranks_on_node(self) -> int | None:
        """The requested number of ranks per node; None if the driver decides it.

        devices=1 means one device per process, so the driver decides.
        """
        count = super().ranks_on_node()
        return None if count == 1 else count

    def start(self, processes: int) -> None:
        """Raises UserError: the script does not start Horovod's ranks."""
        ranks = processes * self.num_nodes
        raise UserError(
            f"{ranks} ranks were requested, but a driver must start horovod's ranks: run "
            f"`multigpu horovodrun -np {ranks} python train.py`, or srun or mpirun on several "
            f"nodes, and leave devices out."
        )

    def connect(self) -> None:
        """Connect as ddp does, then call Horovod's init."""
        super().connect()
        package().init()

    @property
    def factor(self) -> int:
        """The factor for the learning rates."""
        return self.world.size if self.scale_learning_rate else 1

    def wrap(self, model: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        """The model itself; the optimizers are replaced by DistributedOptimizers."""
        hvd = package()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        compression = hvd.Compression.fp16 if self.fp16_compression else hvd.Compression.none
        for index, optimizer in enumerate(optimizers):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            factor = self._remaining_factor(optimizer)
            for group in optimizer.param_groups:
                for key in GROUP_KEYS & set(group):
                    group[key] = group[key] * factor
            named = [
                (names[id(parameter)], parameter)
                for group in optimizer.param_groups
                for parameter in group["params"]
            ]
            optimizers[index] = hvd.DistributedOptimizer(
                optimizer,
                named_parameters=named,
                backward_passes_per_step=self.backwards_per_step,
                compression=compression,
            )
        self.wrapped_optimizers = list(optimizers)
        self.averaged = trainable_parameters(model)
        return model

    def _remaining_factor(self, scaled: Optimizer | LRScheduler) -> float:
        """The factor by which to multiply an optimizer's or a scheduler's learning rates now.

        The optimizer or scheduler stores its current factor, because a later fit can use it
        again with another strategy.
        """
        remaining = self.factor / getattr(scaled, "_learning_rate_factor", 1)
        scaled._learning_rate_factor = self.factor
        return remaining

    def scale_schedulers(self, schedulers: list[LRScheduler]) -> None:
        """Multiply the schedulers' learning rates and bounds."""
        for scheduler in schedulers:
            factor = self._remaining_factor(scheduler)
            for name in SCHEDULER_ATTRIBUTES:
                if not hasattr(scheduler, name):
                    continue
                rates = getattr(scheduler, name)
                if isinstance(rates, list):
                    setattr(scheduler, name, [rate * factor for rate in rates])
                else:
                    setattr(scheduler, name, rates * factor)
            # SequentialLR and ChainedScheduler contain other schedulers.
            self.scale_schedulers(getattr(scheduler, "_schedulers", []))

    def detach(self) -> None:
        """Restore the optimizers' original classes."""
        for optimizer in self.wrapped_optimizers:
            remove_averaging(optimizer)
        self.wrapped_optimizers = []
        super().detach()

    def synchronize(self, optimizer: Optimizer) -> None:
        """Wait for the averages."""
        optimizer.synchronize()

    def optimizer_step_context(self, optimizer: Optimizer) -> AbstractContextManager:
        """A context without a second averaging: `synchronize` has averaged the gradients."""
        return optimizer.skip_synchronize()
