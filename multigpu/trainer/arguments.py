"""Reads the Trainer's arguments: translates old names, checks names and numbers, and chooses
the strategy.
"""

import ast
import inspect
import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any

from multigpu import devices as compute_devices
from multigpu.errors import UserError, did_you_mean, pluralize
from multigpu.launch.world import World, find_world, is_rank_zero
from multigpu.strategies import Strategy, strategy_by_name
from multigpu.strategies.accelerators import Accelerator, resolve
from multigpu.trainer.refused import REFUSED, refuse

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer

# Old name → today's name. The values mean the same.
RENAMED = {
    "replace_sampler_ddp": "use_distributed_sampler",
    "nb_gpu_nodes": "num_nodes",
    "num_processes": "devices",
}
# What accelerator could be in Lightning before 1.5 → today's arguments.
OLD_ACCELERATORS = {
    name: {"strategy": name, "accelerator": "auto"}
    for name in ("dp", "ddp", "ddp2", "ddp_spawn", "horovod")
} | {"ddp_cpu": {"strategy": "ddp_spawn", "accelerator": "cpu"}}
# All old names that `translate_old_names` translates.
OLD = ("gpus", "distributed_backend", *RENAMED)


def with_environment(init: Callable[..., None]) -> Callable[..., None]:
    """Give Trainer.__init__ the arguments that variables such as PL_TRAINER_DEVICES name.

    An argument that the user gives has precedence. A variable's value is read as Python's
    number, True, False, None, list or dict, and else as text.
    """
    names = list(inspect.signature(init).parameters)[1:]

    @wraps(init)
    def init_with_environment(self: "Trainer", *args: Any, **given: Any) -> None:
        found = {
            name: _value_of(os.environ[variable])
            for name in names
            if (variable := f"PL_TRAINER_{name.upper()}") in os.environ
        }
        init(self, *args, **{**found, **given})

    return init_with_environment


def _value_of(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def add_to_parser(parser: ArgumentParser, trainer: "type[Trainer]") -> ArgumentParser:
    """Add the Trainer's arguments, and their old names, to a parser. Returns the parser.

    The values are read as those of PL_TRAINER_… are. A switch such as --fast_dev_run needs no
    value.
    """
    group = parser.add_argument_group("Trainer", "see help(multigpu.trainer.Trainer)")
    for name, parameter in _of_trainer(trainer).items():
        switch = {"nargs": "?", "const": True} if type(parameter.default) is bool else {}
        group.add_argument(f"--{name}", default=parameter.default, type=_value_of, **switch)
    for name in OLD:
        group.add_argument(f"--{name}", default=SUPPRESS, type=_value_of, help=SUPPRESS)
    return parser


def from_parsed(args: Namespace, trainer: "type[Trainer]") -> dict[str, Any]:
    """The Trainer's arguments among the parsed ones, except those that have their default.

    Old ones that are not None are included, and unsupported ones that are not off (None,
    False), so that the Trainer translates them, or raises its sentence.
    """
    known = _of_trainer(trainer)
    return {
        name: value
        for name, value in vars(args).items()
        if (name in known and value != known[name].default)
        or (name in OLD and value is not None)
        or (name in REFUSED and value is not None and value is not False)
    }


def _of_trainer(trainer: "type[Trainer]") -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(trainer.__init__).parameters
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def translate_old_names(
    old: dict[str, Any],
    accelerator: str,
    strategy: str | Strategy,
    devices: Any,
    known: Iterable[str],
) -> dict[str, Any]:
    """Return today's arguments for old ones, such as gpus=2, and print a hint with both.

    old      the arguments whose names are not today's; accelerator can also be an old value
    known    today's names

    Raises UserError for an unsupported or unknown name, for a `gpus` that contradicts
    accelerator or devices, and for two strategies.
    """
    translated: dict[str, Any] = {}
    if accelerator in OLD_ACCELERATORS:
        old = {"accelerator": accelerator, **old}
        translated |= OLD_ACCELERATORS[accelerator]
        accelerator = translated["accelerator"]
    _check_one_strategy(old.get("distributed_backend"), translated.get("strategy"), strategy)
    for name, value in old.items():
        if name == "accelerator":
            continue
        if name == "gpus":
            if value is None:
                continue
            fitting = ("auto", "gpu", "cuda") if value else ("auto", "cpu")
            if accelerator not in fitting or devices != "auto":
                raise UserError(
                    f"gpus={value!r} contradicts accelerator or devices: leave gpus out."
                )
            translated["accelerator"] = "gpu" if value else "cpu"
            if value:
                translated["devices"] = value
        elif name == "distributed_backend":
            if value is not None:
                translated["strategy"] = value
        elif name in RENAMED:
            translated[RENAMED[name]] = value
        elif name in REFUSED:
            refuse(name)
        else:
            hint = did_you_mean(name, known) or "see help(Trainer)."
            raise UserError(f"the Trainer has no argument {name!r}: {hint}")
    virtual = translated.get("accelerator") == "gpu" and not _gpu_count()
    if translated and is_rank_zero():
        was = ", ".join(f"{name}={value!r}" for name, value in old.items())
        now = ", ".join(f"{name}={value!r}" for name, value in translated.items())
        note = ""
        if virtual:
            note = "; this machine has no GPU, so virtual GPUs are used (accelerator='vgpu')"
        print(f"hint: instead of Trainer({was}), write Trainer({now}){note}")
    if virtual:
        translated["accelerator"] = "vgpu"
    return translated


def _check_one_strategy(
    backend: str | None, accelerator: str | None, strategy: str | Strategy
) -> None:
    """Raise UserError if arguments name different strategies: one would be left out."""
    given = {
        "distributed_backend": backend,
        "accelerator": accelerator,
        "strategy": None if strategy == "auto" else strategy,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if len(set(given.values())) > 1:
        raise UserError(
            f"{' and '.join(given)} name different strategies: give strategy only."
        )


def _gpu_count() -> int:
    """The number of GPUs; 0 on the classroom cluster, whose nodes share one machine."""
    import torch

    if os.environ.get("SLURM_CLUSTER_NAME") == compute_devices.CLASSROOM:
        return 0
    return torch.cuda.device_count()


def choose(
    strategy: str | Strategy, accelerator: str, devices: Any, num_nodes: int | None
) -> tuple[Strategy, Accelerator]:
    """Return the strategy and the accelerator; the strategy is configured for the accelerator.

    strategy="auto" picks a strategy that uses all devices.
    """
    if num_nodes is not None and (type(num_nodes) is not int or num_nodes < 1):
        raise UserError(f"num_nodes is {num_nodes!r}: expected a whole number from 1 up.")
    name = strategy if isinstance(strategy, str) else strategy.name
    several = type(devices) is int and devices > 1
    one_process = name in ("dp", "ddp2", "pipeline")
    if accelerator == "auto" and several and one_process and _gpu_count() < devices:
        # These strategies need several devices in one process: the machine has one CPU, or
        # fewer GPUs.
        accelerator = "vgpu"
    resolved = resolve(accelerator, devices)
    if strategy == "auto":
        strategy, reason = _pick(resolved, num_nodes or 1, find_world())
        if reason and is_rank_zero():
            print(f"strategy: {strategy}, since {reason}")
    cores = compute_devices.available_cores()
    if resolved.kind == "vgpu" and (resolved.count or 1) > 4 * cores and is_rank_zero():
        print(f"hint: {resolved.count} devices share {pluralize(cores, 'core')} of the CPU")
    chosen = strategy_by_name(strategy)
    chosen.configure(resolved, num_nodes or 1)
    return chosen, resolved


def _pick(accelerator: Accelerator, num_nodes: int, world: World) -> tuple[str, str]:
    """Return a strategy's name, and the reason for it; for one device the reason is ""."""
    if world.size > 1 and not (Strategy.has_been_rank and accelerator.count == 1):
        return "ddp", f"{world.launcher} has started {world.size} ranks"
    if num_nodes > 1:
        return "ddp", f"num_nodes={num_nodes}"
    if (accelerator.count or 1) == 1:
        return "single_device", ""
    devices = f"devices={accelerator.count}"
    if "ipykernel" in sys.modules or hasattr(sys, "ps1"):
        return "ddp_notebook", f"{devices}, and ddp cannot start a notebook or shell again"
    return "ddp", f"{devices}: each device gets a process that runs this script"


def check_manual_optimization(trainer: "Trainer") -> None:
    """Raises UserError for arguments that only automatic optimization supports."""
    if trainer.gradient_clip_val:
        raise UserError(
            "gradient_clip_val is for automatic optimization: call "
            "self.clip_gradients(optimizer, …) in training_step."
        )
    if trainer.accumulate_grad_batches > 1:
        raise UserError(
            "accumulate_grad_batches is for automatic optimization: call optimizer.step() "
            "only after every n-th batch."
        )
    if len(trainer.strategy.devices) > 1:
        raise UserError(
            f"{trainer.strategy.name} does not support manual optimization because it would "
            f"run training_step, and so optimizer.step(), once for each part of a batch: use "
            f"automatic optimization, or strategy='ddp'."
        )


def check_numbers(trainer: "Trainer") -> None:
    """Raises UserError for a Trainer argument that is out of range."""
    for name in ("max_epochs", "min_epochs", "max_steps", "min_steps"):
        value = getattr(trainer, name)
        if value is not None and (type(value) is not int or value < -1):
            raise UserError(
                f"{name} is {value!r}: expected a whole number from 0 up, or -1 for no limit."
            )
    # log_every_n_steps=0 means never.
    for name, least in (
        ("fast_dev_run", 0),
        ("accumulate_grad_batches", 1),
        ("log_every_n_steps", 0),
        ("reload_dataloaders_every_n_epochs", 0),
        ("check_val_every_n_epoch", 1),
    ):
        value = getattr(trainer, name)
        counts_batches = name == "check_val_every_n_epoch" and value is None
        is_switch = name == "fast_dev_run" and type(value) is bool
        if counts_batches or is_switch:
            continue
        if type(value) is not int or value < least:
            raise UserError(f"{name} is {value!r}: expected a whole number from {least} up.")
    limits = [f"limit_{kind}_batches" for kind in ("train", "val", "test", "predict")]
    for name in (*limits, "overfit_batches", "val_check_interval"):
        _check_batches(name, getattr(trainer, name))
    value = trainer.gradient_clip_val
    if value is not None and (type(value) not in (int, float) or value < 0):
        raise UserError(
            f"gradient_clip_val is {value!r}: expected a number from 0 up, or None."
        )
    algorithm = trainer.gradient_clip_algorithm
    if algorithm not in (None, "norm", "value"):
        raise UserError(
            f"gradient_clip_algorithm is {algorithm!r}: expected 'norm' or 'value'."
        )
    interval = trainer.val_check_interval
    if trainer.check_val_every_n_epoch is None and type(interval) is not int:
        raise UserError(
            "check_val_every_n_epoch=None counts batches across epochs: "
            "give val_check_interval as a number of batches."
        )


def _check_batches(name: str, value: Any) -> None:
    """Raises UserError unless `value` is a number of batches, a fraction, or None."""
    if value is None:
        return
    is_number = type(value) in (int, float) and value >= 0
    too_large = type(value) is float and value > 1
    never = value == 0 and name == "val_check_interval"
    if not is_number or too_large or never:
        raise UserError(
            f"{name} is {value!r}: expected a number of batches, or a fraction from "
            f"0.0 to 1.0."
        )


def batches_between_validations(trainer: "Trainer", epoch: float, validates: bool) -> float:
    """Return val_check_interval as a number of batches; infinity: at the epoch's end.

    epoch   batches per epoch; val_check_interval can be a fraction of this number
    """
    interval = trainer.val_check_interval
    if type(interval) is int:
        if validates and trainer.check_val_every_n_epoch is not None and interval > epoch:
            raise UserError(
                f"val_check_interval={interval}, but an epoch has {epoch} batches: give at "
                f"most {epoch}, or check_val_every_n_epoch=None to count across epochs."
            )
        return interval
    if epoch == float("inf"):
        if validates and interval != 1.0:
            raise UserError(
                f"val_check_interval={interval} is a fraction, but the dataloader has no "
                f"length: give a whole number."
            )
        return float("inf")
    return max(1, int(epoch * interval))
