"""One call of fit, validate, test or predict on a rank, from start to end."""

import os
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from multigpu.errors import UserError, pluralize
from multigpu.launch.rendezvous import fail_together
from multigpu.trainer import check_model, checkpoints, dataloaders, optimizers, seed
from multigpu.trainer.evaluate import EvaluationLoop
from multigpu.trainer.fit import FitLoop
from multigpu.trainer.fit_data import FitData
from multigpu.trainer.hyperparameters import drop_unpicklable, log_hyperparameters
from multigpu.trainer.loggers import Logger
from multigpu.trainer.precision import Precision
from multigpu.trainer.results import Metrics
from multigpu.trainer.run import Run, StepModule, Task
from multigpu.trainer.step import LightningOptimizer, check_closure


def run_stage(run: Run, task: Task) -> Any:
    """Run the task; the strategy is connected."""
    state = run.state
    datamodule = run.datamodule
    stage = task.stage
    try:
        state.ckpt_path = checkpoints.resolve_path(run, task.ckpt_path)
        _set_up(run, stage)
        loaded = checkpoints.restore_model(run, state.ckpt_path, task.weights_only)
        returned = _fit(run, loaded) if stage == "fit" else _evaluate(run, task.keeps_outputs)
    except BaseException as error:
        state.end(failed=True)
        run.call("on_exception", error)
        for logger in run.trainer.loggers:
            logger.finalize("failed")
        run.log.outside()
        run.strategy.detach()
        run.move_to_cpu()
        raise
    run.strategy.close()
    run.move_to_cpu()
    if datamodule is not None:
        datamodule.teardown(stage=stage)
    run.call("teardown", stage)
    for logger in run.trainer.loggers:
        logger.finalize("success")
    state.end()
    return returned


def _set_up(run: Run, stage: str) -> None:
    """Call the hooks of the setup, and place the module on its device."""
    strategy = run.strategy
    module = run.module
    run.precision = Precision(run.settings.precision, strategy.device)
    if run.precision.scaler is not None and not strategy.supports_loss_scaling:
        algorithm = type(getattr(strategy, "algorithm", strategy)).__name__
        raise UserError(
            f"precision 16-mixed uses loss scaling, which can skip a step; {strategy.name} "
            f"{algorithm} does not support that: give precision='bf16-mixed'."
        )
    _make_deterministic(run.settings.deterministic)
    parts = [module] if run.datamodule is None else [run.datamodule, module]
    for part in (*parts, *run.callbacks):
        check_model.check_hooks(part)
    for logger in run.trainer.loggers:
        logger.is_global_zero = strategy.is_global_zero
        if strategy.world.size > 1 and isinstance(logger, Logger):
            logger.set_version(strategy.broadcast(logger.version))
    world = strategy.world
    for part in parts:
        with fail_together(world, strategy.gather_objects):
            if (world.local_rank if part.prepare_data_per_node else world.rank) == 0:
                part.prepare_data()
    if run.datamodule is not None:
        with fail_together(world, strategy.gather_objects):
            run.datamodule.setup(stage=stage)
    run.call("setup", stage)
    for part in parts:
        drop_unpicklable(part)
    module.configure_model()
    run.precision.convert_module(module)
    strategy.place(module)
    run.model = StepModule(module)


def _make_deterministic(deterministic: bool | str | None) -> None:
    """Let torch refuse operations that are not deterministic; with "warn", warn of them."""
    if deterministic:
        # cuBLAS requires it for deterministic results.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")


def _fit(run: Run, loaded: dict[str, Any] | None) -> None:
    state = run.state
    module = run.module
    state.should_stop = False
    _limit_epochs(run)
    data = FitData(run)
    run.fit_loop = FitLoop(run, data)
    _configure_optimizers(run)
    run.call("on_fit_start")
    _print_summary(run)
    log_hyperparameters(run)
    if loaded:
        checkpoints.restore_training(run, loaded)
    module.zero_grad()
    if data.validates and run.settings.num_sanity_val_steps and not loaded:
        _sanity_check(run, data)
    run.fit_loop.fit()
    run.call("on_fit_end")


def _print_summary(run: Run) -> None:
    """Print the number of the model's parameters, and what computes."""
    if run.settings.enable_model_summary is False:
        return
    parameters = [parameter for parameter in run.module.parameters() if not is_lazy(parameter)]
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    strategy = run.strategy
    run.print(
        f"{type(run.module).__name__}: {total:,} parameters, {trained:,} of them trained; "
        f"{strategy.name} on {pluralize(strategy.world.size, 'rank')}, "
        f"{strategy.device.type}, {run.precision.name}"
    )


def _limit_epochs(run: Run) -> None:
    """Replace max_epochs=None: by no limit if there is max_steps, else by 1000."""
    settings = run.settings
    if settings.max_epochs is not None:
        return
    if settings.max_steps != -1:
        settings.max_epochs = -1
        return
    settings.max_epochs = 1000
    run.state.warn_once(
        "max_epochs was not set, so this fit has 1000 epochs: give max_epochs, or -1 for no "
        "limit."
    )


def _configure_optimizers(run: Run) -> None:
    """Call `configure_optimizers`; the strategy wraps the model and adds optimizer hooks."""
    strategy = run.strategy
    module = run.module
    automatic = module.automatic_optimization
    if not automatic:
        check_model.check_manual_optimization(run)
    with run.log.within("configure_optimizers"):
        returned = module.configure_optimizers()
    run.optimizers, run.schedulers = optimizers.parse(returned, automatic)
    for optimizer in run.optimizers:
        check_closure(optimizer)
    if automatic and not run.optimizers:
        run.state.warn_once(
            "configure_optimizers returned None: nothing is learned in this fit."
        )
    strategy.backwards_per_step = run.settings.accumulate_grad_batches
    strategy.manual_optimization = not automatic
    run.model = strategy.wrap(run.model, run.optimizers)
    strategy.scale_schedulers([config.scheduler for config in run.schedulers])
    run.lightning_optimizers = [
        LightningOptimizer(optimizer, run) for optimizer in run.optimizers
    ]


def _sanity_check(run: Run, data: FitData) -> None:
    """Run some validation batches before training, to find mistakes in validation early.

    Afterwards, the metrics are empty and the random states are restored.
    """
    state = run.state
    state.stage = "sanity_check"
    run.call("on_sanity_check_start")
    with seed.preserved_random_states():
        data.load_validation()
        data.validation.evaluate(sanity_steps=run.settings.num_sanity_val_steps)
    run.call("on_sanity_check_end")
    state.metrics = Metrics()
    state.stage = "train"


def _evaluate(run: Run, keeps_outputs: bool) -> list | None:
    stage = run.state.fn
    name = "val" if stage == "validate" else stage
    if not run.has_loader(name):
        raise UserError(
            f"trainer.{stage} has no data: give dataloaders, a datamodule, or write "
            f"{name}_dataloader."
        )
    run.model = run.strategy.wrap_for_evaluation(run.model)
    run.module.zero_grad()
    if getattr(run.settings, f"limit_{name}_batches") == 0:
        return None if stage == "predict" else []
    loaders = dataloaders.as_list(dataloaders.find(run, name))
    loop = EvaluationLoop(run, stage, loaders, keeps_outputs and stage == "predict")
    of_dataloaders = loop.evaluate()
    if stage == "predict":
        return loop.predictions()
    return [
        {name: float(value) for name, value in metrics.items()} for metrics in of_dataloaders
    ]
