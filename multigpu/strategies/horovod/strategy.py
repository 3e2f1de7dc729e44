"""horovod: each gradient is averaged as soon as it is there, and the learning rate grows with the number of ranks.

    multigpu horovodrun -np 4 python train.py

Where a package `horovod` can be imported, it does the work; else the course's own, in horovod.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.launch.world import find
from multigpu.strategies import horovod as own
from multigpu.strategies.ddp import DDPStrategy, learning

# Where learning rates stand, and bounds of them: OneCycleLR's in the groups; CyclicLR's, the cosines' and the plateau's.
RATES_OF_GROUPS = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr"}
RATES_OF_SCHEDULERS = {"base_lrs", "max_lrs", "eta_min", "min_lrs", "_last_lr"}


def package() -> ModuleType:
    """The real `horovod.torch` if it can be imported, else the course's own module of the same shape."""
    try:
        import horovod.torch as real
    except ImportError:
        return own
    return real


class HorovodStrategy(DDPStrategy):
    """One process a device, started by horovodrun, mpirun, srun or torchrun: never by the script itself.

    The learning rates, and what schedulers take for them, are multiplied by the number of ranks, as Lightning's strategy did. So a
    run is not numerically that of ddp unless the learning rate is divided by it: scale_learning_rate=False leaves it alone.
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
        self.scale_learning_rate, self.fp16_compression = scale_learning_rate, fp16_compression
        self.averaging: list[Optimizer] = []  # what `wrap` has changed

    def ranks_on_node(self) -> int | None:
        count = super().ranks_on_node()
        return (
            None if count == 1 else count
        )  # devices=1 is one a process: the driver says how many processes

    def start(self, processes: int) -> None:
        raise UserError(
            f"horovod's ranks are started by a driver, and devices={processes} asks for {processes}: "
            f"run `multigpu horovodrun -np {processes} python train.py`, and leave devices out."
        )

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        if find().launcher == "python" and (self.ranks_on_node() or 1) > 1:
            self.start(self.ranks_on_node() or 1)
        return function(*args)

    def connect(self) -> None:
        super().connect()
        package().init()

    @property
    def factor(self) -> int:
        """What learning rates are multiplied by."""
        return self.world.size if self.scale_learning_rate else 1

    def wrap(self, model: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        hvd = package()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        owners = {id(p): name for name, p in model.named_parameters()}
        for place, optimizer in enumerate(optimizers):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for group in optimizer.param_groups:
                for key in RATES_OF_GROUPS & set(group):
                    group[key] = group[key] * self._factor_of(optimizer)
            optimizer._rates_are_times = self.factor
            named = [
                (owners[id(p)], p) for group in optimizer.param_groups for p in group["params"]
            ]
            optimizers[place] = hvd.DistributedOptimizer(
                optimizer, named_parameters=named, backward_passes_per_step=self.backwards,
                compression=hvd.Compression.fp16 if self.fp16_compression else hvd.Compression.none,
            )  # fmt: skip
        self.averaging, self.averaged = list(optimizers), learning(model)
        return model

    def _factor_of(self, what: Any) -> float:
        """What has been multiplied in an earlier fit is so already."""
        return self.factor / getattr(what, "_rates_are_times", 1)

    def adapt(self, schedulers: list) -> None:
        for scheduler in schedulers:
            factor = self._factor_of(scheduler)
            scheduler._rates_are_times = self.factor
            for name in filter(partial(hasattr, scheduler), RATES_OF_SCHEDULERS):
                rates = getattr(scheduler, name)
                scaled = (
                    [rate * factor for rate in rates]
                    if isinstance(rates, list)
                    else rates * factor
                )
                setattr(scheduler, name, scaled)
            self.adapt(
                getattr(scheduler, "_schedulers", [])
            )  # SequentialLR's and ChainedScheduler's

    def detach(self) -> None:
        for optimizer in self.averaging:
            own.undo(optimizer)
        self.averaging = []
        super().detach()

    def synchronize(self, optimizer: Optimizer) -> None:
        optimizer.synchronize()

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager:
        return optimizer.skip_synchronize()
