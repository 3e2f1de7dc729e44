"""bagua: what is sent, to whom, and when: six answers, from Bagua (https://github.com/BaguaSys/bagua).

`ALGORITHMS` names them. Each is a module of its own, which says what moves.
"""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from multigpu.errors import UserError, did_you_mean
from multigpu.strategies.bagua.async_average import AsyncModelAverage
from multigpu.strategies.bagua.bytegrad import ByteGrad
from multigpu.strategies.bagua.decentralized import Decentralized
from multigpu.strategies.bagua.gradient_allreduce import GradientAllReduce
from multigpu.strategies.bagua.low_precision import LowPrecisionDecentralized
from multigpu.strategies.bagua.qadam import QAdam
from multigpu.strategies.ddp import DDPStrategy

ALGORITHMS = {
    "gradient_allreduce": GradientAllReduce,
    "bytegrad": ByteGrad,
    "qadam": QAdam,
    "decentralized": Decentralized,
    "low_precision_decentralized": LowPrecisionDecentralized,
    "async": AsyncModelAverage,
}
# A gradient scaler multiplies what they exchange, or skips a step in which the neighbours count on this rank.
NOT_FLOAT16 = ("qadam", "low_precision_decentralized")


class BaguaStrategy(DDPStrategy):
    """One process a device, as ddp, with one of Bagua's algorithms in the place of ddp's all-reduce.

    algorithm    a name in ALGORITHMS
    **keywords   the algorithm's own: peer_selection_mode, sync_interval_ms, …
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
            hint = f"{did_you_mean(algorithm, ALGORITHMS, cutoff=0.4)} There are {', '.join(ALGORITHMS)}."
            raise UserError(f"bagua has no algorithm {algorithm!r}: {hint.strip()}")
        try:
            self.algorithm = ALGORITHMS[algorithm](**keywords)
        except TypeError as error:
            raise UserError(
                f"bagua's {algorithm} does not take that argument ({error})."
            ) from None
        self.takes_float16 = algorithm not in NOT_FLOAT16

    def wrap(self, model: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        return self.algorithm.attach(model, optimizers, self.distributed)

    def close(self) -> None:
        self.algorithm.close()
        super().close()

    def detach(self) -> None:
        self.algorithm.detach()
        super().detach()
