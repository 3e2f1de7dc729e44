"""What do the Trainer's arguments mean? Old names, names that are not here, numbers that make no sense, and which strategy."""

import os
import sys
from typing import Any

from multigpu import devices as places
from multigpu.errors import UserError, did_you_mean, pluralize
from multigpu.launch.world import World, find, is_rank_zero
from multigpu.strategies import Strategy, named
from multigpu.strategies.accelerators import Accelerator, resolve

# Lightning's arguments, of today and of old, that this Trainer does not have, and what does the same.
NOT_HERE = {
    "plugins": "a strategy and a precision cover what they are used for here",
    "barebones": "turn off logger, enable_checkpointing and enable_progress_bar",
    "reload_dataloaders_every_n_epochs": "give a data set that changes by itself",
    "model_registry": "it belongs to Lightning's own platform",
    "enable_autolog_hparams": "hyperparameters are logged where save_hyperparameters was called",
    "tpu_cores": "there are cpu, gpu and vgpu",
    "ipus": "there are cpu, gpu and vgpu",
    "resume_from_checkpoint": "give trainer.fit(model, ckpt_path=…)",
    "auto_lr_find": "try some learning rates",
    "auto_scale_batch_size": "try some batch sizes",
    "amp_backend": "torch's own autocast is used: give precision='16-mixed'",
    "amp_level": "torch's own autocast is used: give precision='16-mixed'",
    "terminate_on_nan": "give detect_anomaly=True",
    "track_grad_norm": "log it in on_before_optimizer_step",
    "checkpoint_callback": "give enable_checkpointing, or a ModelCheckpoint in callbacks",
    "progress_bar_refresh_rate": "give TQDMProgressBar(refresh_rate=…) in callbacks",
    "weights_summary": "give enable_model_summary",
    "weights_save_path": "give ModelCheckpoint(dirpath=…) in callbacks",
    "stochastic_weight_avg": "use torch.optim.swa_utils",
    "truncated_bptt_steps": "use manual optimization",
}
OLD = {
    "replace_sampler_ddp": "use_distributed_sampler",
    "nb_gpu_nodes": "num_nodes",
    "num_processes": "devices",
}


def understand_old_names(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """gpus=2, distributed_backend='ddp' → what is written today, with a line that says so.

    `old` holds the arguments that the Trainer does not have, `new` the others. Raises UserError for all but the old names.
    """
    understood: dict[str, Any] = {}
    for name, value in old.items():
        if name == "gpus":
            if new["accelerator"] not in ("auto", "gpu", "cuda") or new["devices"] != "auto":
                raise UserError(
                    f"gpus={value!r} and today's accelerator or devices contradict: leave gpus out."
                )
            if value not in (None, 0):
                understood |= {"accelerator": "gpu", "devices": value}
        elif name == "distributed_backend":
            understood["strategy"] = value
        elif name in OLD:
            understood[OLD[name]] = value
        elif name in NOT_HERE:
            raise UserError(
                f"this Trainer has no argument {name!r}, unlike Lightning's: {NOT_HERE[name]}."
            )
        else:
            raise UserError(
                f"the Trainer has no argument {name!r}: {did_you_mean(name, new) or 'see help(Trainer).'}"
            )
    if understood and is_rank_zero():
        was = ", ".join(f"{name}={value!r}" for name, value in old.items())
        now = ", ".join(f"{name}={value!r}" for name, value in understood.items())
        virtual = ""
        if understood.get("accelerator") == "gpu" and not _gpus():
            virtual = "; this machine has no GPU, so virtual ones compute (accelerator='vgpu')"
        print(f"hint: Trainer({was}) is written Trainer({now}) today{virtual}")
    if understood.get("accelerator") == "gpu" and not _gpus():
        understood["accelerator"] = "vgpu"
    return understood


def _gpus() -> int:
    import torch

    return (
        0
        if os.environ.get("SLURM_CLUSTER_NAME") == places.CLASSROOM
        else torch.cuda.device_count()
    )


def choose(
    strategy: str | Strategy, accelerator: str, devices: Any, num_nodes: int | None
) -> tuple[Strategy, Accelerator]:
    """The strategy, told what it computes on. Where none was asked for and there are several devices, one is picked."""
    if num_nodes is not None and (type(num_nodes) is not int or num_nodes < 1):
        raise UserError(f"num_nodes is {num_nodes!r}: expected a whole number from 1 up.")
    name = strategy if isinstance(strategy, str) else strategy.name
    several = type(devices) is int and devices > 1
    if (
        accelerator == "auto"
        and several
        and name in ("dp", "ddp2", "pipeline")
        and not _gpus()
    ):
        accelerator = "vgpu"  # they want several devices in one process, and there is one CPU
    found = resolve(accelerator, devices)
    if strategy == "auto":
        strategy, why = _pick(found, num_nodes or 1, find())
        if why and is_rank_zero():
            print(f"strategy: {strategy}, since {why}")
    cores = len(os.sched_getaffinity(0))
    if found.kind != "cuda" and (found.count or 1) > 4 * cores and is_rank_zero():
        print(
            f"hint: {found.count} devices compute on {pluralize(cores, 'core')} of the CPU, and share them"
        )
    chosen = named(strategy)
    chosen.configure(found, num_nodes or 1)
    return chosen, found


def _pick(accelerator: Accelerator, num_nodes: int, world: World) -> tuple[str, str]:
    if world.size > 1 and not (Strategy.met and accelerator.count == 1):
        return "ddp", f"{world.launcher} has started {world.size} ranks"
    if num_nodes > 1:
        return "ddp", f"num_nodes={num_nodes}"
    if (accelerator.count or 1) == 1:
        return "single_device", ""
    what = f"devices={accelerator.count}"
    if "ipykernel" in sys.modules or hasattr(sys, "ps1"):
        return (
            "ddp_notebook",
            f"{what}, and there is no script that could be started again for each",
        )
    return "ddp", f"{what}: a process each, which start this script again"


def refuse_by_hand(trainer: Any) -> None:
    """Raises UserError for what belongs to automatic optimization, where `training_step` optimizes by itself."""
    if trainer.gradient_clip_val:
        raise UserError(
            "gradient_clip_val is for automatic optimization: call self.clip_gradients(optimizer, …) in training_step."
        )
    if trainer.accumulate_grad_batches > 1:
        raise UserError(
            "accumulate_grad_batches is for automatic optimization: call optimizer.step() every so many batches."
        )
    if len(trainer.strategy.devices) > 1:
        raise UserError(
            f"manual optimization steps in training_step, which {trainer.strategy.name} runs once for each piece of a batch: "
            f"use automatic optimization, or strategy='ddp'."
        )


def check_numbers(trainer: Any) -> None:
    """Raises UserError for a Trainer argument that cannot be meant."""
    for name in ("max_epochs", "min_epochs", "max_steps", "min_steps"):
        value = getattr(trainer, name)
        if value is not None and (type(value) is not int or value < -1):
            raise UserError(
                f"{name} is {value!r}: expected a whole number from 0 up, or -1 for no limit."
            )
    for name in ("accumulate_grad_batches", "log_every_n_steps"):
        value = getattr(trainer, name)
        least = 0 if name.startswith("log") else 1  # 0: never
        if type(value) is not int or value < least:
            raise UserError(f"{name} is {value!r}: expected a whole number from {least} up.")
    limits = [f"limit_{kind}_batches" for kind in ("train", "val", "test", "predict")]
    for name in (*limits, "overfit_batches", "val_check_interval"):
        value = getattr(trainer, name)
        if value is None:
            continue
        none = value == 0 and name == "val_check_interval"
        if (
            none
            or type(value) not in (int, float)
            or value < 0
            or (type(value) is float and value > 1)
        ):
            raise UserError(
                f"{name} is {value!r}: expected a number of batches, or a share of them, 0.0 to 1.0."
            )
    clip, how = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if clip is not None and (type(clip) not in (int, float) or clip < 0):
        raise UserError(
            f"gradient_clip_val is {clip!r}: expected a number from 0 up, or None."
        )
    if how not in (None, "norm", "value"):
        raise UserError(f"gradient_clip_algorithm is {how!r}: expected 'norm' or 'value'.")
    if trainer.check_val_every_n_epoch is None and type(trainer.val_check_interval) is not int:
        raise UserError(
            "check_val_every_n_epoch=None counts over epochs: give val_check_interval as a number of batches."
        )


def batches_between_validations(trainer: Any, epoch: float, validates: bool) -> float:
    """val_check_interval is a number of batches, or a share of the `epoch`'s."""
    interval = trainer.val_check_interval
    if type(interval) is int:
        if validates and trainer.check_val_every_n_epoch is not None and interval > epoch:
            raise UserError(
                f"val_check_interval={interval}, and an epoch has {epoch} batches: give at most that many, or "
                f"check_val_every_n_epoch=None to count on over epochs."
            )
        return interval
    if epoch == float("inf"):
        if validates and interval != 1.0:
            raise UserError(
                f"val_check_interval={interval}, a share of a loader without a length: give a whole number."
            )
        return float("inf")
    return max(1, int(epoch * interval))
