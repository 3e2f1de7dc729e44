"""bagua: ddp with one of Bagua's six algorithms, which differ in what is sent, and when.

`ALGORITHMS` lists them (https://github.com/BaguaSys/bagua). Each has its own module.
"""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from multigpu.errors import UserError, did_you_mean
from multigpu.strategies.bagua.async_average import AsyncModelAverage
from multigpu.strategies.bagua.base import Algorithm
from multigpu.strategies.bagua.bytegrad import ByteGrad
from multigpu.strategies.bagua.decentralized import Decentralized
from multigpu.strategies.bagua.gradient_allreduce import GradientAllReduce
from multigpu.strategies.bagua.low_precision import LowPrecisionDecentralized
from multigpu.strategies.bagua.qadam import QAdam
from multigpu.strategies.ddp import DDPStrategy

ALGORITHMS: dict[str, type[Algorithm]] = {
    "gradient_allreduce": GradientAllReduce,
    "bytegrad": ByteGrad,
    "qadam": QAdam,
    "decentralized": Decentralized,
    "low_precision_decentralized": LowPrecisionDecentralized,
    "async": AsyncModelAverage,
}
# A gradient scaler would multiply the momenta of qadam. It can also skip a step, in which the
# neighbours in low_precision_decentralized expect a message.
NO_LOSS_SCALING = ("qadam", "low_precision_decentralized")


class BaguaStrategy(DDPStrategy):
    """One process per device, as in ddp, with one of Bagua's algorithms for communication.

    algorithm    a name in ALGORITHMS
    **keywords   the algorithm's own arguments, with Bagua's names and meaning:
                 peer_selection_mode of decentralized, sync_interval_ms of async. Bagua's
                 others are not here: as with hierarchical=False, average=True and
                 communication_interval=1.
    """

    name = "bagua"

    def __init__(
        self,
        algorithm: str = "gradient_allreduce",
        process_group_backend: str | None = None,
        **keywords: Any,
    ):
        super().__init__(process_group_backend)
        if algorithm not in ALGORITHMS:
            hint = did_you_mean(algorithm, ALGORITHMS, cutoff=0.4)
            hint += f" There are {', '.join(ALGORITHMS)}."
            raise UserError(f"bagua has no algorithm {algorithm!r}: {hint.strip()}")
        try:
            self.algorithm = ALGORITHMS[algorithm](**keywords)
        except TypeError as error:
            raise UserError(
                f"bagua's {algorithm} was given an argument that it does not accept: {error}."
            ) from None
        self.supports_loss_scaling = algorithm not in NO_LOSS_SCALING

    def wrap(self, model: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        """The module that the algorithm returns: DDP, or the model with hooks."""
        return self.algorithm.attach(model, optimizers, self.distributed)

    @property
    def ranks_step_together(self) -> bool:
        """False for async."""
        return self.algorithm.ranks_step_together

    def close(self) -> None:
        """Finish the algorithm's communication on all ranks, and remove its hooks."""
        self.algorithm.close()
        super().close()

    def detach(self) -> None:
        """Remove the algorithm's hooks, and drop the references to the model."""
        self.algorithm.detach()
        super().detach()
