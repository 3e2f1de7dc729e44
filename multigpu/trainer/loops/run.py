"""What happens between `trainer.fit(…)` and the first batch, and after the last? On every rank, in this order."""

import os
from typing import Any

import torch
from torch import nn

from multigpu.devices import on_the_cpu
from multigpu.errors import UserError, pluralize
from multigpu.rendezvous import fail_together, same_everywhere
from multigpu.trainer import arguments, defaults, seed
from multigpu.trainer.checkpointing import checkpoint_io
from multigpu.trainer.hooks import DataHooks, overridden
from multigpu.trainer.loops import call_hooks, dataloaders, optimizers
from multigpu.trainer.loops.evaluate import Evaluation
from multigpu.trainer.loops.fit import FitLoop
from multigpu.trainer.loops.optimizers import Stepper
from multigpu.trainer.loops.precision import Precision
from multigpu.trainer.loops.results import PIECE, Results
from multigpu.trainer.loops.transfer import own_transfer
from multigpu.trainer.module import LightningModule
from multigpu.trainer.summary import introduce

NEEDS = {
    "fit": ("training_step", "configure_optimizers"),
    "validate": ("validation_step",),
    "test": ("test_step",),
    "predict": (),
}


class Step(nn.Module):
    """What strategies wrap: its forward is one of the module's steps, so that DDP and DataParallel see them."""

    def __init__(self, module: LightningModule):
        super().__init__()
        self.module = module

    def forward(self, name: str, *args: Any) -> Any:
        PIECE.batch = args[0]
        try:
            return getattr(self.module, name)(*args)
        finally:
            PIECE.batch = None


def check_model(stage: str, model: Any) -> None:
    """Raises UserError for what is no module of ours, or lacks a step."""
    if model is None:
        raise UserError(
            f"trainer.{stage}: no model was given, and none was before: give a LightningModule."
        )
    if isinstance(getattr(model, "_orig_mod", None), LightningModule):
        raise UserError(
            f"trainer.{stage}: a compiled module hides its steps: compile its layers, self.net = torch.compile(…)."
        )
    if not isinstance(model, LightningModule):
        raise UserError(
            f"trainer.{stage}: {type(model).__name__} is not a LightningModule: give a subclass of "
            f"multigpu.trainer.LightningModule."
        )
    for name in NEEDS[stage]:
        if not overridden(name, model, LightningModule):
            raise UserError(
                f"{type(model).__name__} has no {name}, which trainer.{stage} needs: write it."
            )


def run_stage(
    trainer: Any,
    stage: str,
    model: Any,
    datamodule: Any,
    ckpt_path: Any,
    given: dict[str, Any],
) -> Any:
    """One call of fit, validate, test or predict, on one rank."""
    strategy = trainer.strategy
    strategy.connect()
    trainer.state.fn, trainer.interrupted = stage, False
    trainer.lightning_module, trainer.datamodule = model, datamodule
    trainer.fitting = None if stage == "fit" else trainer.fitting
    model.trainer = trainer
    if datamodule is not None:
        datamodule.trainer = trainer
    trainer.results = Results(
        strategy.gather_objects, trainer.world_size, training=stage == "fit"
    )
    trainer.forget()
    try:
        ckpt_path = checkpoint_io.named(
            trainer, ckpt_path
        )  # before configure_callbacks may give a new ModelCheckpoint
        _set_up(trainer, stage)
        found = (_fit if stage == "fit" else _evaluate)(trainer, stage, ckpt_path, given)
    except BaseException as error:
        trainer.evaluating, trainer.sanity_checking, trainer.training = None, False, False
        for callback in trainer.callbacks:
            callback.on_exception(trainer, model, error)
        for logger in trainer.loggers:
            logger.finalize("failed")
        strategy.detach()
        _take_home(trainer)
        raise
    strategy.close()
    _take_home(trainer)
    for callback in trainer.callbacks:
        callback.teardown(trainer, model, stage)
    if datamodule is not None:
        datamodule.teardown(stage)
    model.teardown(stage)
    for logger in trainer.loggers:
        logger.finalize("success")
    if trainer.profiler is not None:
        trainer.profiler.describe()
        trainer.profiler.teardown(stage)
    if trainer.interrupted:
        raise SystemExit(143)  # what a shell says of a process that SIGTERM has ended
    return found


def _take_home(trainer: Any) -> None:
    """As Lightning does: afterwards the model is without its wrapper, and on the CPU, like the optimizers' states."""
    trainer.model = trainer.lightning_module
    if trainer.strategy.device.type == "vgpu":
        from multigpu import vgpu

        if not vgpu.computes():
            return  # shapes, and no numbers to take
    trainer.model.cpu()
    for optimizer in trainer.optimizers:
        for key, state in optimizer.state.items():
            optimizer.state[key] = on_the_cpu(state)


def _set_up(trainer: Any, stage: str) -> None:
    model, datamodule, strategy = (
        trainer.lightning_module,
        trainer.datamodule,
        trainer.strategy,
    )
    trainer.precision_plugin = Precision(trainer.precision, strategy.device)
    if trainer.precision_plugin.scaler is not None and not strategy.takes_float16:
        raise UserError(
            f"precision 16-mixed scales the loss and may skip a step, which {strategy.name} "
            f"{type(getattr(strategy, 'algorithm', strategy)).__name__} cannot bear: give precision='bf16-mixed'."
        )
    if trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS wants for it
        torch.use_deterministic_algorithms(True, warn_only=trainer.deterministic == "warn")
    if trainer.benchmark is not None:
        torch.backends.cudnn.benchmark = trainer.benchmark
    own = model.configure_callbacks()
    own = list(own) if isinstance(own, (list, tuple)) else [own]
    kept = [
        cb for cb in trainer.callbacks if type(cb) not in {type(callback) for callback in own}
    ]
    trainer.callbacks = defaults.in_order(kept + own)
    for logger in trainer.loggers:
        logger.is_global_zero = trainer.is_global_zero
        logger.set_version(strategy.broadcast(logger.version))
    if trainer.profiler is not None:
        trainer.profiler.setup(stage, trainer.local_rank, trainer.log_dir)
    for part in (model,) if datamodule is None else (datamodule, model):
        with fail_together(strategy.world, strategy.gather_objects):
            if strategy.world.local_rank == 0:
                part.prepare_data()
    if datamodule is not None:
        with fail_together(strategy.world, strategy.gather_objects):
            datamodule.setup(stage)
    with trainer.results.within("setup"):
        for callback in trainer.callbacks:
            callback.setup(trainer, model, stage)
        model.setup(stage)
    model.configure_model()
    trainer.own_transfer = own_transfer(datamodule, model)
    trainer.results.home = strategy.device if len(strategy.devices) > 1 else None
    if trainer.sync_batchnorm and strategy.world.size > 1:
        if strategy.device.type == "cpu":
            raise UserError(
                "sync_batchnorm=True, and torch's SyncBatchNorm computes on no CPU: give accelerator='gpu' or 'vgpu'."
            )
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    trainer.precision_plugin.convert_module(model)
    strategy.place(model)
    trainer.model = Step(model)


def _fit(trainer: Any, stage: str, ckpt_path: Any, given: dict[str, Any]) -> None:
    model, strategy = trainer.lightning_module, trainer.strategy
    trainer.ckpt_path, loaded = ckpt_path, checkpoint_io.restored(trainer, ckpt_path)
    train = _loader(trainer, "train", given)
    if train is None:
        raise UserError(
            "trainer.fit has nothing to learn from: give train_dataloaders, a datamodule, or write train_dataloader."
        )
    if isinstance(train, (list, tuple, dict)):
        raise UserError(
            "trainer.fit takes one training dataloader: join the data sets in one, or zip them in its data set."
        )
    validation = None
    wanted = (
        overridden("validation_step", model, LightningModule)
        and trainer.limit_val_batches != 0
    )
    loaders = dataloaders.listed(_loader(trainer, "val", given)) if wanted else []
    sized, gather = dataloaders.length(train) < float("inf"), strategy.gather_objects
    same_everywhere(
        strategy.world,
        "the kind of training dataloader (with a length, or without)",
        sized,
        gather,
    )
    same_everywhere(
        strategy.world, "the number of validation dataloaders", len(loaders), gather
    )
    if wanted and not loaders:
        trainer.warn_once(
            "the module has a validation_step, and there are no validation dataloaders: nothing is validated."
        )
    if loaders:
        validation = Evaluation(trainer, "validate", loaders, trainer.limit_val_batches)
        trainer.num_val_batches = validation.limits
    trainer.train_dataloader = trainer.deal(train, training=True)
    trainer.fitting = FitLoop(trainer, trainer.train_dataloader, validation)
    trainer.num_training_batches = trainer.fitting.batches_of_epoch
    if not model.automatic_optimization:
        arguments.refuse_by_hand(trainer)
    with trainer.results.within("configure_optimizers"):
        returned = model.configure_optimizers()
    trainer.optimizers, trainer.lr_scheduler_configs = optimizers.parse(
        returned, model.automatic_optimization
    )
    strategy.backwards, strategy.manual = (
        trainer.accumulate_grad_batches,
        not model.automatic_optimization,
    )
    trainer.model = strategy.wrap(trainer.model, trainer.optimizers)
    strategy.adapt([config.scheduler for config in trainer.lr_scheduler_configs])
    trainer.steppers = [Stepper(optimizer, trainer) for optimizer in trainer.optimizers]
    if loaded:
        checkpoint_io.restore_training(trainer, loaded, ckpt_path)
    introduce(trainer)
    call_hooks.call(trainer, "on_fit_start")
    if validation and trainer.num_sanity_val_steps and not loaded:
        _sanity_check(trainer, validation)
    trainer.training, trainer.should_stop = True, False
    if still := sum(not part.training for part in model.modules()):
        trainer.warn_once(
            f"{pluralize(still, 'module')} in eval mode at the start of training, and left so: call model.train()."
        )
    with trainer.signals.watched():
        trainer.fitting.run()
    trainer.training = False
    call_hooks.call(trainer, "on_fit_end")


def _sanity_check(trainer: Any, validation: Evaluation) -> None:
    """Some validation batches before training, so that a mistake there shows at once. It leaves no trace."""
    trainer.sanity_checking = True
    call_hooks.call(trainer, "on_sanity_check_start")
    with seed.untouched():
        validation.run(sanity=trainer.num_sanity_val_steps)
    call_hooks.call(trainer, "on_sanity_check_end")
    trainer.forget()
    trainer.sanity_checking = False


def _evaluate(trainer: Any, stage: str, ckpt_path: Any, given: dict[str, Any]) -> list | None:
    checkpoint_io.restored(trainer, ckpt_path)
    name = {"validate": "val"}.get(stage, stage)
    loaders = dataloaders.listed(_loader(trainer, name, given))
    if not loaders:
        raise UserError(
            f"trainer.{stage} has no data: give dataloaders, a datamodule, or write {name}_dataloader."
        )
    trainer.model = trainer.strategy.evaluated(trainer.model)
    evaluation = Evaluation(trainer, stage, loaders, getattr(trainer, f"limit_{name}_batches"))
    setattr(trainer, f"num_{name}_batches", evaluation.limits)
    if stage == "predict":
        return evaluation.predict()
    return [
        {name: float(value) for name, value in metrics.items()} for metrics in evaluation.run()
    ]


def _loader(trainer: Any, name: str, given: dict[str, Any]) -> Any:
    """The dataloader that was given, else the data module's, else the module's; None if there is none."""
    found = given.get(name)
    for source, base in (
        (trainer.datamodule, DataHooks),
        (trainer.lightning_module, LightningModule),
    ):
        if (
            found is None
            and source is not None
            and overridden(f"{name}_dataloader", source, base)
        ):
            found = getattr(source, f"{name}_dataloader")()
    if name != "train":
        setattr(trainer, f"{name}_dataloaders", found)
    return found


def estimated_steps(trainer: Any) -> float:
    """Optimizer steps in the whole run, for schedulers that want to know; -1 or infinity where nobody does."""
    if trainer.fitting is None:
        raise UserError(
            "trainer.estimated_stepping_batches is known from configure_optimizers on: ask for it there."
        )
    batches = trainer.fitting.batches_of_epoch
    endless = trainer.max_epochs == -1 or batches == float("inf")
    by_epochs = (
        float("inf")
        if endless
        else -(-batches // trainer.accumulate_grad_batches) * trainer.max_epochs
    )
    steps = by_epochs if trainer.max_steps == -1 else min(by_epochs, trainer.max_steps)
    return int(steps) if steps != float("inf") else steps
