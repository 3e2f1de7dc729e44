"""Runs one call of fit, validate, test or predict on a rank, from start to end."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from multigpu.devices import to_cpu
from multigpu.errors import UserError, pluralize
from multigpu.rendezvous import fail_together
from multigpu.trainer import arguments, defaults, seed
from multigpu.trainer.checkpointing import restoring
from multigpu.trainer.checkpointing.hyperparameters import (
    HyperparametersMixin,
    drop_unpicklable,
)
from multigpu.trainer.datamodule import LightningDataModule
from multigpu.trainer.hooks import is_overridden
from multigpu.trainer.loops import call_hooks, dataloaders, optimizers
from multigpu.trainer.loops.check_model import check_training_step, warn_of_removed_hooks
from multigpu.trainer.loops.evaluate import EvaluationLoop
from multigpu.trainer.loops.fit import FitLoop
from multigpu.trainer.loops.fit_data import FitData
from multigpu.trainer.loops.log_context import LogContext
from multigpu.trainer.loops.optimizer_step import (
    LightningOptimizer,
    OptimizerStep,
    check_closure,
)
from multigpu.trainer.loops.precision import Precision
from multigpu.trainer.loops.predict import PredictionLoop
from multigpu.trainer.loops.results import Results
from multigpu.trainer.loops.step_module import StepModule
from multigpu.trainer.loops.transfer import BatchTransfer
from multigpu.trainer.module import LightningModule
from multigpu.trainer.states import RunningStage
from multigpu.trainer.summary import print_summary_and_log_hparams

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


def run_stage(
    trainer: "Trainer",
    stage: str,
    model: LightningModule,
    datamodule: LightningDataModule | None,
    ckpt_path: str | Path | None,
    given: dict[str, Any],
) -> Any:
    """Run `stage` ("fit", "validate", "test" or "predict") on one rank.

    given   the user's dataloaders by "train", "val", "test", "predict"
    """
    state = trainer.state
    strategy = trainer.strategy
    strategy.connect()
    results = Results(strategy.gather_objects, trainer.world_size, training=stage == "fit")
    state.begin(stage, model, datamodule, results)
    stage = state.fn  # hooks get Lightning's TrainerFn, which equals its text
    attach(trainer, model)
    if datamodule is not None:
        datamodule.trainer = trainer
    try:
        # Before configure_callbacks, which can replace the ModelCheckpoint that knows "best".
        ckpt_path = restoring.resolve_path(trainer, ckpt_path)
        state.ckpt_path = ckpt_path
        _set_up(trainer, stage)
        if stage == "fit":
            returned = _fit(trainer, ckpt_path, given)
        else:
            returned = _evaluate(trainer, stage, ckpt_path, given)
    except BaseException as error:
        state.fail()
        for callback in trainer.callbacks:
            callback.on_exception(trainer, model, error)
        if datamodule is not None:
            datamodule.on_exception(error)
        for logger in trainer.loggers:
            logger.finalize("failed")
        state.end_hooks()
        call_hooks.detach_callbacks(trainer)
        strategy.on_exception(error)
        strategy.detach()
        _move_to_cpu(trainer)
        raise
    strategy.close()
    _move_to_cpu(trainer)
    if datamodule is not None:
        datamodule.teardown(stage=stage)
    for callback in trainer.callbacks:
        callback.teardown(trainer, model, stage=stage)
    call_hooks.detach_callbacks(trainer)
    model.teardown(stage=stage)
    for logger in trainer.loggers:
        logger.finalize("success")
    state.finish()
    if state.interrupted:
        raise SystemExit(143)  # 128 + 15: a shell's exit code for a process that SIGTERM ended
    return returned


def attach(trainer: "Trainer", model: LightningModule) -> None:
    """Give the module its Trainer, and a LogContext for the time when no hook runs.

    The LightningModules that are parts of it have the Trainer, but no LogContext.
    """
    model.trainer = trainer
    model.__dict__["_log_context"] = LogContext(trainer.state.results)


def _move_to_cpu(trainer: "Trainer") -> None:
    """Move the module and the optimizers' states to the CPU, as Lightning does after a run."""
    state = trainer.state
    state.model = state.lightning_module
    if state.fit_loop is not None:
        state.fit_loop.training_step = None  # it refers to the strategy's wrapper
    if trainer.strategy.device.type == "vgpu":
        from multigpu import vgpu

        if not vgpu.computes():
            return  # tensors have only shapes: there are no values to move
    state.model.cpu()
    for optimizer in state.optimizers:
        for key, value in optimizer.state.items():
            optimizer.state[key] = to_cpu(value)


def _set_up(trainer: "Trainer", stage: str) -> None:
    state = trainer.state
    strategy = trainer.strategy
    model = state.lightning_module
    datamodule = state.datamodule
    state.precision = Precision(trainer.precision, strategy.device)
    if state.precision.scaler is not None and not strategy.supports_loss_scaling:
        algorithm = type(getattr(strategy, "algorithm", strategy)).__name__
        raise UserError(
            f"precision 16-mixed uses loss scaling, which can skip a step; {strategy.name} "
            f"{algorithm} does not support that: give precision='bf16-mixed'."
        )
    _configure_torch(trainer)
    own = model.configure_callbacks()
    own = list(own) if isinstance(own, (list, tuple)) else [own]
    replaced = {type(callback) for callback in own}
    kept = [callback for callback in trainer.callbacks if type(callback) not in replaced]
    trainer.callbacks[:] = defaults.checkpoints_last(kept + own)
    call_hooks.attach_callbacks(trainer)
    for part in (model, datamodule, *trainer.callbacks):
        warn_of_removed_hooks(part)
    for logger in trainer.loggers:
        logger.is_global_zero = trainer.is_global_zero
        if strategy.world.size > 1:
            logger.set_version(strategy.broadcast(logger.version))
    for part in (model,) if datamodule is None else (datamodule, model):
        with fail_together(strategy.world, strategy.gather_objects):
            world = strategy.world
            if (world.local_rank if part.prepare_data_per_node else world.rank) == 0:
                part.prepare_data()
    if datamodule is not None:
        with fail_together(strategy.world, strategy.gather_objects):
            datamodule.setup(stage=stage)
    with state.running_hook("setup"):
        for callback in trainer.callbacks:
            callback.setup(trainer, model, stage=stage)
        model.setup(stage=stage)
    for part in (model, datamodule):
        if isinstance(part, HyperparametersMixin):
            drop_unpicklable(part)
    configure_model(model)
    state.transfer = BatchTransfer(strategy.device, state.precision, datamodule, model)
    if len(strategy.devices) > 1:
        state.results.device = strategy.device
    if trainer.sync_batchnorm and strategy.world.size > 1:
        if strategy.device.type == "cpu":
            raise UserError(
                "sync_batchnorm=True needs torch's SyncBatchNorm, which does not support the "
                "CPU: give accelerator='gpu' or 'vgpu'."
            )
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    state.precision.convert_module(model)
    strategy.place(model)
    state.model = StepModule(model)


def configure_model(model: LightningModule) -> None:
    """Call the hook in which the module makes its layers, under both of its names."""
    overridden = type(model).configure_sharded_model
    if overridden is not LightningModule.configure_sharded_model:
        model.configure_sharded_model()
    model.configure_model()


def _configure_torch(trainer: "Trainer") -> None:
    if trainer.deterministic:
        # cuBLAS requires it for deterministic results.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=trainer.deterministic == "warn")
    if trainer.benchmark is not None:
        torch.backends.cudnn.benchmark = trainer.benchmark


def _fit(trainer: "Trainer", ckpt_path: str | None, given: dict[str, Any]) -> None:
    state = trainer.state
    state.should_stop = False
    model = state.lightning_module
    defaults.limit_epochs(trainer)
    loaded = restoring.restore_model(trainer, ckpt_path)
    data = FitData(trainer, given)
    state.fit_loop = FitLoop(trainer, data)
    _configure_optimizers(trainer)
    call_hooks.call(trainer, "on_fit_start")
    print_summary_and_log_hparams(trainer)
    if loaded:
        restoring.restore_training(trainer, loaded, ckpt_path)
    model.zero_grad()
    if data.validates and trainer.num_sanity_val_steps and not loaded:
        _sanity_check(trainer, data)
    in_eval_mode = sum(not part.training for part in model.modules())
    if in_eval_mode:
        state.warn_once(
            f"training starts with {pluralize(in_eval_mode, 'module')} in eval mode and keeps "
            f"this mode: call model.train() to change it."
        )
    with state.sigterm.handled(), torch.autograd.set_detect_anomaly(trainer.detect_anomaly):
        state.fit_loop.run()
    call_hooks.call(trainer, "on_fit_end")


def _configure_optimizers(trainer: "Trainer") -> None:
    """Call `configure_optimizers`; the strategy wraps the model and adds optimizer hooks."""
    state = trainer.state
    strategy = trainer.strategy
    model = state.lightning_module
    if model.automatic_optimization:
        check_training_step(model)
    else:
        arguments.check_manual_optimization(trainer)
    with state.running_hook("configure_optimizers"):
        returned = model.configure_optimizers()
    state.optimizers, state.lr_scheduler_configs = optimizers.parse(
        returned,
        model.automatic_optimization,
        is_overridden("lr_scheduler_step", model, LightningModule),
    )
    for optimizer in state.optimizers:
        check_closure(optimizer)
    strategy.backwards_per_step = trainer.accumulate_grad_batches
    strategy.manual_optimization = not model.automatic_optimization
    state.model = strategy.wrap(state.model, state.optimizers)
    strategy.scale_schedulers([config.scheduler for config in state.lr_scheduler_configs])
    state.lightning_optimizers = [
        LightningOptimizer(optimizer, state, strategy) for optimizer in state.optimizers
    ]
    state.optimizer_step = OptimizerStep(trainer)


def _sanity_check(trainer: "Trainer", data: FitData) -> None:
    """Run some validation batches before training, to find mistakes in validation early.

    Afterwards, the metrics are empty and the random states are restored.
    """
    state = trainer.state
    state.stage = RunningStage.SANITY_CHECKING
    call_hooks.call(trainer, "on_sanity_check_start")
    with seed.preserved_random_states():
        data.load_validation()
        data.validation.run(sanity_steps=trainer.num_sanity_val_steps)
    call_hooks.call(trainer, "on_sanity_check_end")
    state.metrics.clear()
    state.stage = RunningStage.TRAINING


def _evaluate(
    trainer: "Trainer", stage: str, ckpt_path: str | None, given: dict[str, Any]
) -> list | None:
    state = trainer.state
    restoring.restore_model(trainer, ckpt_path)
    name = "val" if stage == "validate" else stage
    if not dataloaders.has_loader(trainer, name, given):
        raise UserError(
            f"trainer.{stage} has no data: give dataloaders, a datamodule, or write "
            f"{name}_dataloader."
        )
    state.model = trainer.strategy.wrap_for_evaluation(state.model)
    state.lightning_module.zero_grad()
    if getattr(trainer, f"limit_{name}_batches") == 0:
        return None if stage == "predict" else []
    loaders = dataloaders.as_list(dataloaders.find_loader(trainer, name, given))
    if stage == "predict":
        return PredictionLoop(trainer, loaders).predict()
    of_dataloaders = EvaluationLoop(trainer, stage, loaders).run()
    return [
        {name: float(value) for name, value in metrics.items()} for metrics in of_dataloaders
    ]
