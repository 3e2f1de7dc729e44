"""The strategies by name: the strings that `Trainer(strategy=…)` accepts."""

from collections.abc import Callable

from multigpu.errors import UserError, did_you_mean
from multigpu.strategies.bagua import BaguaStrategy
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
LARGE_MODELS = "for a model that is too large for one GPU, use 'pipeline'; else 'ddp'"
OTHER_DEVICES = "the accelerators are cpu, gpu and vgpu; use 'ddp'"
# Lightning's strategies that are not here → what does the same, or comes nearest.
ALTERNATIVES = {
    "fsdp": LARGE_MODELS,
    "deepspeed": LARGE_MODELS,
    "ddp_sharded": LARGE_MODELS,
    "colossalai": LARGE_MODELS,
    "model_parallel": LARGE_MODELS,
    "ddp_fork": "use 'ddp_spawn', or 'ddp_notebook' in a notebook",
    "ddp_cpu": "use 'ddp_spawn' with accelerator='cpu'",
    "xla": OTHER_DEVICES,
    "tpu": OTHER_DEVICES,
    "hpu": OTHER_DEVICES,
}
# ddp, ddp_spawn and ddp_notebook can have this suffix, followed by "true" or "false".
UNUSED = "_find_unused_parameters_"


def strategy_by_name(strategy: str | Strategy) -> Strategy:
    """Return a new strategy with that name; return a Strategy object as it is.

    Accepts a name of STRATEGIES, and "ddp_find_unused_parameters_true". The course adds short
    names that Lightning does not have: "bagua:bytegrad" is BaguaStrategy("bytegrad"), and
    "bagua:decentralized:shift_one" is BaguaStrategy("decentralized",
    peer_selection_mode="shift_one"). Raises UserError with the most similar names.
    """
    if isinstance(strategy, Strategy):
        return strategy
    family, _, rest = str(strategy).partition(":")
    if family == "bagua" and rest:
        return _bagua(strategy, rest)
    stem, _, wanted = str(strategy).partition(UNUSED)
    if stem in ("ddp", "ddp_spawn", "ddp_notebook") and wanted in ("true", "false"):
        return STRATEGIES[stem](find_unused_parameters=wanted == "true")
    for name, alternative in ALTERNATIVES.items():
        # "fsdp_cpu_offload" belongs to "fsdp", and "deepspeed_stage_2" to "deepspeed".
        if f"{strategy}_".startswith(f"{name}_"):
            raise UserError(
                f"Lightning has the strategy {strategy!r}, but this Trainer does not: "
                f"{alternative}."
            )
    if strategy not in STRATEGIES:
        hint = did_you_mean(strategy, STRATEGIES)
        hint += f" There are {', '.join(map(repr, STRATEGIES))}"
        hint += ", and this course's short names 'bagua:bytegrad' and so on."
        raise UserError(f"there is no strategy {strategy!r}: {hint.strip()}")
    return STRATEGIES[strategy]()


def _bagua(strategy: str, rest: str) -> BaguaStrategy:
    algorithm, _, mode = rest.partition(":")
    if not mode:
        return BaguaStrategy(algorithm)
    if algorithm != "decentralized":
        raise UserError(
            f"{strategy!r} gives {algorithm} a mode, but only decentralized has modes: "
            f"give 'bagua:{algorithm}'."
        )
    return BaguaStrategy(algorithm, peer_selection_mode=mode)
