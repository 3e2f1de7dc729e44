"""Which strategy is meant by a name? The strings that `Trainer(strategy=…)` takes."""

from collections.abc import Callable

from multigpu.errors import UserError, did_you_mean
from multigpu.strategies.bagua.strategy import BaguaStrategy
from multigpu.strategies.base import Strategy
from multigpu.strategies.ddp import DDPStrategy
from multigpu.strategies.ddp2 import DDP2Strategy
from multigpu.strategies.dp import DataParallelStrategy
from multigpu.strategies.horovod.strategy import HorovodStrategy
from multigpu.strategies.pipeline import PipelineStrategy
from multigpu.strategies.single import SingleDeviceStrategy
from multigpu.strategies.spawn import DDPNotebookStrategy, DDPSpawnStrategy

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "single_device": SingleDeviceStrategy,
    "dp": DataParallelStrategy,
    "ddp": DDPStrategy,
    "ddp_spawn": DDPSpawnStrategy,
    "ddp_notebook": DDPNotebookStrategy,
    "ddp2": DDP2Strategy,
    "horovod": HorovodStrategy,
    "bagua": BaguaStrategy,
    "pipeline": PipelineStrategy,
}
UNUSED = "_find_unused_parameters_"  # ddp_find_unused_parameters_true and _false, and so for spawn and notebook


def named(strategy: str | Strategy) -> Strategy:
    """The strategy of that name, new; a strategy itself is given back. Raises UserError, with the nearest names.

    A name of STRATEGIES, "bagua:bytegrad" and so on, "bagua:decentralized:shift_one", or "ddp_find_unused_parameters_true".
    """
    if isinstance(strategy, Strategy):
        return strategy
    kind, _, rest = str(strategy).partition(":")
    if kind == "bagua" and rest:
        algorithm, _, mode = rest.partition(":")
        if mode and algorithm != "decentralized":
            raise UserError(
                f"{strategy!r}: of bagua's algorithms only decentralized has modes: give 'bagua:{algorithm}'."
            )
        return BaguaStrategy(algorithm, **({"peer_selection_mode": mode} if mode else {}))
    stem, _, wanted = str(strategy).partition(UNUSED)
    if stem in ("ddp", "ddp_spawn", "ddp_notebook") and wanted in ("true", "false"):
        return STRATEGIES[stem](find_unused_parameters=wanted == "true")
    if strategy not in STRATEGIES:
        hint = f"{did_you_mean(strategy, STRATEGIES)} There are {', '.join(map(repr, STRATEGIES))}."
        raise UserError(f"there is no strategy {strategy!r}: {hint.strip()}")
    return STRATEGIES[strategy]()
