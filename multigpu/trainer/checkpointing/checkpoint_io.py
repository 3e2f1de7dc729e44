"""What is in a checkpoint? Lightning's own form, so that each can go on from the other's, and what an exact resume needs."""

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from multigpu.checkpoint import random_states, set_random_states
from multigpu.errors import UserError
from multigpu.files import atomic
from multigpu.rendezvous import fail_together

VERSION = "2.6.6"  # the Lightning whose form this is
OURS = "multigpu"  # a key of our own, which Lightning passes over
TRAINING = (
    "callbacks",
    "optimizer_states",
    "lr_schedulers",
    "MixedPrecision",
)  # what weights alone leave out


def save(trainer: Any, path: str | Path, weights_only: bool = False) -> None:
    """All ranks call it; rank 0 writes, under a temporary name that is then renamed."""
    if trainer.lightning_module is None:
        raise UserError(
            "trainer.save_checkpoint: nothing has been trained yet: call fit before, or torch.save the weights."
        )
    problem, content = None, trainer.state.spawned_checkpoint or compose(trainer, weights_only)
    if trainer.is_global_zero:
        if weights_only:
            content = {key: part for key, part in content.items() if key not in TRAINING}
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with atomic(Path(path)) as temporary:
                torch.save(content, temporary)
        except (OSError, RuntimeError) as error:
            problem = f"cannot write {path} ({error}): make room there, or give another dirpath or default_root_dir."
    problem = trainer.strategy.broadcast(
        problem
    )  # a barrier, too: nobody reads the file before it is there
    if problem:
        raise UserError(problem, already_reported=not trainer.is_global_zero)


def compose(trainer: Any, weights_only: bool) -> dict:
    """What `save` writes. All ranks call it: each has random states of its own, and hooks may hold collectives."""
    fit = trainer.state.fit_loop
    states = trainer.strategy.gather_objects(
        (random_states(), fit.epoch_began if fit else None)
    )
    content = dump(trainer, weights_only)
    if fit:
        told = {
            "batches_done": fit.batches_done,
            "to_do": fit.to_do,
            "random": states,
            "watched": watched(trainer),
        }
        content[OURS] = told
    return content


def dump(trainer: Any, weights_only: bool) -> dict:
    """Lightning's keys: epoch (from 0, the one that is running), global_step, state_dict, optimizer_states, …"""
    module, datamodule = trainer.lightning_module, trainer.datamodule
    content: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": VERSION,
        "state_dict": module.state_dict(),
        "loops": loops(trainer),
    }
    if not weights_only:
        content["callbacks"] = {
            cb.state_key: state for cb in trainer.callbacks if (state := cb.state_dict())
        }
        content["optimizer_states"] = [
            optimizer.state_dict() for optimizer in trainer.optimizers
        ]
        content["lr_schedulers"] = [
            config.scheduler.state_dict() for config in trainer.lr_scheduler_configs
        ]
        if trainer.precision_plugin.scaler is not None:
            content["MixedPrecision"] = trainer.precision_plugin.scaler.state_dict()
    for part in (module, datamodule):
        if part is not None and part.hparams:
            content[part.CHECKPOINT_HYPER_PARAMS_KEY] = dict(part.hparams)
            if name := getattr(part, "_hparams_name", None):
                content[part.CHECKPOINT_HYPER_PARAMS_NAME] = name
    if datamodule is not None and (state := datamodule.state_dict()):
        content[type(datamodule).__qualname__] = state
    with trainer.state.running_hook("on_save_checkpoint"):
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, module, content)
        module.on_save_checkpoint(content)
    return content


def watched(trainer: Any) -> dict:
    """What the schedulers will be told that watch a metric: at an epoch's end they step once all callbacks have saved."""
    names = {
        config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau
    }
    told = trainer.callback_metrics
    return {name: float(told[name]) for name in names if name in told}


def loops(trainer: Any) -> dict:
    """Lightning's counters, in its own nesting, for an epoch's end or a place within it."""
    fit = trainer.state.fit_loop
    if fit is None:
        return {}
    n, epoch, last = (
        fit.batches_done or fit.batches_of_epoch,
        trainer.current_epoch,
        fit.batches_done == 0 or fit.last,
    )
    begun = epoch + int(fit.epoch_ended or fit.batches_done > 0)
    steps = {"ready": trainer.global_step, "completed": trainer.global_step}
    full = {"ready": n, "started": n, "processed": n, "completed": n}
    total = {key: fit.total_batches for key in full}
    done = {
        "ready": begun,
        "started": begun,
        "processed": epoch + fit.epoch_ended,
        "completed": epoch,
    }
    zero = {"total": {"ready": 0, "completed": 0}, "current": {"ready": 0, "completed": 0}}
    manual = not trainer.lightning_module.automatic_optimization
    step = {"total": steps, "current": {"ready": 0, "completed": 0}}
    nothing = dict.fromkeys(full, 0)
    return {
        "fit_loop": {
            "state_dict": {},
            "epoch_loop.state_dict": {"_batches_that_stepped": trainer.state.progress.batches_that_stepped},
            "epoch_loop.batch_progress": {
                "total": total,
                "current": full,
                "is_last_batch": last,
            },
            "epoch_loop.scheduler_progress": zero,
            "epoch_loop.automatic_optimization.state_dict": {},
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {
                    "step": zero if manual else step,
                    "zero_grad": {"total": nothing, "current": nothing},
                }
            },
            "epoch_loop.manual_optimization.state_dict": {},
            "epoch_loop.manual_optimization.optim_step_progress": step if manual else zero,
            "epoch_loop.val_loop.state_dict": {},
            "epoch_loop.val_loop.batch_progress": {
                "total": nothing,
                "current": nothing,
                "is_last_batch": True,
            },
            "epoch_progress": {"total": done, "current": done},
        }
    }


def read(
    path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
) -> dict:
    """Raises UserError if there is none, or it is none; unless weights_only=False, also for more than numbers and texts."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(
                path, map_location=map_location, weights_only=weights_only is not False
            )
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}: give another path.") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: give a checkpoint in it.") from None
    except Exception as error:  # a damaged file can make the unpickler raise anything
        if what := re.search(r"Unsupported (?:global|class): (?:GLOBAL )?(\S+)", str(error)):
            raise UserError(
                f"{path} holds objects that are more than numbers and texts ({what[1]}): give weights_only=False if you "
                f"trust who made it."
            ) from None
        raise UserError(f"{path} is truncated or not a checkpoint: give another.") from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise UserError(f"{path} holds no 'state_dict': it is not a Trainer's checkpoint.")
    return content


def load_weights(
    module: torch.nn.Module, content: dict, path: str | Path, strict: bool
) -> None:
    """Raises UserError that names the first tensor that does not fit; the module is then as it was."""
    now = {
        key: value
        for key, value in module.state_dict().items()
        if isinstance(value, torch.Tensor) and not is_lazy(value)
    }
    before = {
        key: value.clone() for key, value in now.items()
    }  # torch loads what fits before it refuses the rest
    try:
        module.load_state_dict(content["state_dict"], strict=strict)
    except RuntimeError as error:
        module.load_state_dict(before, strict=False)
        there, here = (
            {
                key: str(tuple(value.shape))
                for key, value in part.items()
                if isinstance(value, torch.Tensor)
            }
            for part in (content["state_dict"], before)
        )
        key = next((key for key in {**here, **there} if here.get(key) != there.get(key)), None)
        what = (
            f"{key} is {there.get(key, 'missing')} there and {here.get(key, 'missing')} here"
            if key
            else f"{error}"
        )
        raise UserError(f"{path} does not fit {type(module).__name__}: {what}.") from None


def construct(
    cls: type, content: dict, path: str | Path, strict: bool | None, keywords: dict
) -> Any:
    """A module of the class, with the checkpoint's weights."""
    module = made(cls, content, path, keywords)
    module.on_load_checkpoint(content)
    load_weights(module, content, path, module.strict_loading if strict is None else strict)
    return module


def made(cls: type, content: dict, path: str | Path, keywords: dict) -> Any:
    """A module, or data module, made with the checkpoint's hyperparameters where its __init__ takes them."""
    import inspect

    stored = dict(content.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}))
    takes = inspect.signature(cls.__init__).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    name = content.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)
    if name and name != "kwargs" and name in takes:
        stored = {name: {**stored, **keywords.pop(name, {})}}
    arguments = {
        key: value for key, value in {**stored, **keywords}.items() if every or key in takes
    }
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"{cls.__name__} cannot be made from {path} ({error}): give the missing arguments to load_from_checkpoint, or call "
            f"self.save_hyperparameters() in __init__."
        ) from None
    return cls(**arguments)


def named(trainer: Any, ckpt_path: Any) -> str | None:
    """What `ckpt_path` means: "best" and "last" by the ModelCheckpoint, else a file."""
    saver = trainer.checkpoint_callback
    if ckpt_path in ("best", "last"):
        known = {
            "best": getattr(saver, "best_model_path", ""),
            "last": getattr(saver, "last_model_path", ""),
        }
        if not known[ckpt_path]:
            raise UserError(
                f"ckpt_path={ckpt_path!r}, and no ModelCheckpoint has saved such a one: give a file.",
                already_reported=not trainer.is_global_zero,
            )
        return known[ckpt_path]
    return None if ckpt_path is None else str(Path(ckpt_path))


def restored(trainer: Any, path: str | None) -> dict | None:
    """What the file holds, of which the model is taken over. It is read on all ranks, or refused on all."""
    if path is None:
        return None
    with fail_together(trainer.strategy.world, trainer.strategy.gather_objects):
        content = read(path, weights_only=trainer.state.weights_only)
    restore(trainer, content, path)
    return content


def restore(trainer: Any, content: dict, path: str | Path) -> None:
    """The model; and in `fit`, all else that the run needs to go on."""
    module = trainer.lightning_module
    module.on_load_checkpoint(content)
    load_weights(module, content, path, module.strict_loading)
    datamodule = trainer.datamodule
    if datamodule is not None and type(datamodule).__qualname__ in content:
        datamodule.load_state_dict(content[type(datamodule).__qualname__])
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, module, content)
        if callback.state_key in content.get("callbacks", {}):
            callback.load_state_dict(content["callbacks"][callback.state_key])


def restore_training(trainer: Any, content: dict, path: str | Path) -> None:
    """Optimizers, schedulers, scaler, counters, random states. Raises UserError if the file has weights alone."""
    if "optimizer_states" not in content:
        raise UserError(
            f"{path} holds weights only, so training cannot go on from it: load it with load_from_checkpoint."
        )
    if len(content["optimizer_states"]) != len(trainer.optimizers):
        raise UserError(
            f"{path} holds {len(content['optimizer_states'])} optimizers, this run has {len(trainer.optimizers)}."
        )
    for optimizer, state in zip(trainer.optimizers, content["optimizer_states"], strict=True):
        optimizer.load_state_dict(state)
    for config, state in zip(
        trainer.lr_scheduler_configs, content.get("lr_schedulers", []), strict=False
    ):
        config.scheduler.load_state_dict(state)
    if trainer.precision_plugin.scaler is not None and "MixedPrecision" in content:
        trainer.precision_plugin.scaler.load_state_dict(content["MixedPrecision"])
    progress_of_run = trainer.state.progress
    fit, told = trainer.state.fit_loop, content.get("loops", {}).get("fit_loop", {})
    progress_of_run.global_step = content["global_step"]
    progress = told.get("epoch_loop.batch_progress", {})
    done = progress.get("current", {}).get("ready", 0)
    ended = progress.get("is_last_batch", True) or not done
    if OURS in content:
        done = content[OURS]["batches_done"]
        ended, fit.to_do = done == 0, content[OURS]["to_do"]
    begun = (
        told.get("epoch_progress", {}).get("current", {}).get("started", content["epoch"] + 1)
    )
    metrics = content.get(OURS, {}).get("watched", {})
    trainer.callback_metrics.update(
        {name: torch.tensor(value) for name, value in metrics.items()}
    )
    progress_of_run.current_epoch = content["epoch"]
    if ended and begun > content["epoch"]:
        if metrics and trainer.lightning_module.automatic_optimization:
            fit.schedule("epoch", plateau=True)
        progress_of_run.current_epoch += 1
    fit.batches_done = 0 if ended else done
    fit.total_batches = progress.get("total", {}).get("ready", 0)
    progress_of_run.batches_that_stepped = told.get("epoch_loop.state_dict", {}).get(
        "_batches_that_stepped", trainer.global_step
    )
    states = content.get(OURS, {}).get("random", [])
    if len(states) == trainer.world_size:
        now, began = states[trainer.global_rank]
        fit.epoch_began = None if ended else began
        fit.after_skip = None if ended else now
        if ended:
            set_random_states(now)
    elif not ended:
        warnings.warn(
            "another number of ranks: within the epoch, the order of the rest of the data differs.",
            stacklevel=2,
        )
