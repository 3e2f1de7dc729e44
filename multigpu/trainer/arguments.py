"""The Trainer's arguments: translates old names, and chooses the strategy and the devices."""

import sys
from collections.abc import Iterable
from typing import Any

from multigpu import devices as compute_devices
from multigpu.errors import UserError, did_you_mean, pluralize
from multigpu.launch.world import World, find_world, is_rank_zero
from multigpu.strategies import Strategy, strategy_by_name
from multigpu.strategies.accelerators import Accelerator, resolve
from multigpu.trainer.refused import REFUSED, refuse

# Old name → today's name. The values mean the same.
RENAMED = {
    "distributed_backend": "strategy",
    "replace_sampler_ddp": "use_distributed_sampler",
    "nb_gpu_nodes": "num_nodes",
    "num_processes": "devices",
}
# What accelerator could be in Lightning before 1.5.
OLD_ACCELERATORS = ("dp", "ddp", "ddp2", "ddp_spawn", "horovod")


def translate_old_names(
    old: dict[str, Any],
    accelerator: str,
    strategy: str | Strategy,
    devices: Any,
    known: Iterable[str],
) -> dict[str, Any]:
    """Return today's arguments for old ones, such as gpus=2, and print a hint with both.

    old      the arguments whose names are not today's
    known    today's names

    Raises UserError for an unsupported or unknown name, for a `gpus` that contradicts
    accelerator or devices, and for two strategies.
    """
    translated: dict[str, Any] = {}
    if accelerator in OLD_ACCELERATORS:
        raise UserError(
            f"accelerator is {accelerator!r}, as before Lightning 1.5: give "
            f"strategy={accelerator!r}, and accelerator='cpu', 'gpu' or 'vgpu'."
        )
    for name, value in old.items():
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
        elif name in RENAMED:
            if value is not None:
                translated[RENAMED[name]] = value
        elif name in REFUSED:
            if value:  # None, False and 0 ask for nothing
                refuse(name)
        else:
            hint = did_you_mean(name, known) or "see help(Trainer)."
            raise UserError(f"the Trainer has no argument {name!r}: {hint}")
    if strategy not in ("auto", translated.get("strategy", strategy)):
        raise UserError(
            "distributed_backend and strategy name different strategies: give strategy only."
        )
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


def _gpu_count() -> int:
    """The number of GPUs; 0 where Slurm only counts GPUs."""
    import torch

    if compute_devices.gpus_are_only_counted():
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
