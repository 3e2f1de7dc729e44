"""Lightning's names that are not here, and what to do instead: one table.

The names of the Trainer's arguments, of callbacks, loggers, functions and methods are all in
REFUSED. A program that needs one of them runs with Lightning itself.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from multigpu.errors import UserError, unsupported

CHECKPOINTS = "call trainer.save_checkpoint in a Callback's hook"
LOGGERS = "use CSVLogger or TensorBoardLogger, or write a Logger"
MEMORY = "use torch.cuda.memory_summary(), or multigpu.memory_held()"
PROFILER = "run fit within torch.profiler.profile()"
RATES = "compare several learning rates yourself"
SIZES = "compare several batch sizes yourself"

REFUSED = {
    # arguments of the Trainer
    "max_time": "set trainer.should_stop in a Callback",
    "profiler": PROFILER,
    "plugins": "give strategy and precision instead",
    "benchmark": "set torch.backends.cudnn.benchmark",
    "detect_anomaly": "run fit within torch.autograd.detect_anomaly()",
    "sync_batchnorm": "call torch.nn.SyncBatchNorm.convert_sync_batchnorm on the model",
    "barebones": "set logger, enable_checkpointing and enable_progress_bar to False",
    "reload_dataloaders_every_n_epochs": "change the data in a sampler's set_epoch",
    "model_registry": "it belongs to Lightning's own platform",
    "enable_autolog_hparams": "call save_hyperparameters: the loggers then log them",
    # methods of the Trainer
    "add_argparse_args": "add the arguments that the program has to its own parser",
    "from_argparse_args": "give the parsed values to Trainer(…)",
    "init_module": "make the module within torch.device(…)",
    "tune": SIZES,
    # arguments of Lightning 1.x
    "resume_from_checkpoint": "call trainer.fit(model, ckpt_path=…)",
    "checkpoint_callback": "give enable_checkpointing, or a ModelCheckpoint in callbacks",
    "progress_bar_refresh_rate": "give TQDMProgressBar(refresh_rate=…) in callbacks",
    "weights_summary": "give enable_model_summary",
    # of the package
    "Fabric": "a strategy's connect, setup and close do the same in your own loop",
    "Tuner": "compare several learning rates or batch sizes yourself",
    "LightningCLI": "write the program with argparse or typer",
    # callbacks
    "Checkpoint": "subclass Callback",
    "EMAWeightAveraging": "use torch.optim.swa_utils in a Callback",
    "SpikeDetection": "compare the losses in a Callback",
    "WeightAveraging": "use torch.optim.swa_utils in a Callback",
    "BasePredictionWriter": "write the outputs in on_predict_batch_end",
    "GradientAccumulationScheduler": "set trainer.accumulate_grad_batches in a Callback",
    "BackboneFinetuning": "call requires_grad_ on the layers, and make a new Trainer after",
    "BaseFinetuning": "call requires_grad_ on the layers, and make a new Trainer after",
    "OnExceptionCheckpoint": "give ModelCheckpoint(every_n_train_steps=…)",
    "LambdaCallback": "write a Callback with these methods",
    "BatchSizeFinder": "double batch_size until multigpu.memory_held() is near the capacity",
    "DeviceStatsMonitor": MEMORY,
    "LearningRateFinder": RATES,
    "ModelPruning": "use torch.nn.utils.prune",
    "ModelSummary": "print(model)",
    "ProgressBar": "subclass TQDMProgressBar, or write a Callback that prints",
    "RichModelSummary": "print(model)",
    "RichProgressBar": "use TQDMProgressBar",
    "StochasticWeightAveraging": "use torch.optim.swa_utils",
    "Timer": "set trainer.should_stop in a Callback",
    "ThroughputMonitor": "measure the time between two on_train_batch_end in a Callback",
    # functions
    "grad_norm": "call torch.nn.utils.get_total_norm on the gradients",
    "measure_flops": "use torch.utils.flop_counter.FlopCounterMode",
    "move_data_to_device": "call .to(self.device) on each tensor",
    "rank_zero_info": "print in a function with @rank_zero_only",
    "rank_zero_warn": "call warnings.warn in a function with @rank_zero_only",
    # profilers
    "PyTorchProfiler": PROFILER,
    "SimpleProfiler": PROFILER,
    # arguments of callbacks
    "process_position": "leave it out",
    "log_rank_zero_only": "leave it out",
    "log_momentum": "log it in a Callback",
    "log_weight_decay": "log it in a Callback",
    "stopping_threshold": "set trainer.should_stop in a Callback",
    "divergence_threshold": "set trainer.should_stop in a Callback",
    "save_on_exception": "give ModelCheckpoint(every_n_train_steps=…)",
    "train_time_interval": CHECKPOINTS,
    # arguments of self.log
    "sync_dist_group": "call torch.distributed.all_reduce, and log the result",
    "metric_attribute": "leave it out",
    "rank_zero_only": "call self.log on rank 0 only, if self.trainer.is_global_zero",
    # loggers and their arguments
    "default_hp_metric": "leave it out",
    "log_graph": "call logger.experiment.add_graph(model, inputs)",
    "prefix": "log the values under longer names",
    "sub_dir": "give the folder in save_dir",
    "CometLogger": LOGGERS,
    "LitLogger": LOGGERS,
    "MLFlowLogger": LOGGERS,
    "NeptuneLogger": LOGGERS,
    "WandbLogger": LOGGERS,
    # data
    "from_datasets": "write a subclass with train_dataloader and val_dataloader",
    "CombinedLoader": "give one DataLoader, of a torch.utils.data.StackDataset",
    # optimizers
    "toggle_model": "call self.toggle_optimizer and self.untoggle_optimizer",
    "closure": "take an optimizer that needs the gradients of one backward",
    # methods of the module, of callbacks and of data modules
    "configure_callbacks": "give the callbacks to the Trainer",
    "configure_sharded_model": "write configure_model",
    "hparams_file": "give the hyperparameters as arguments",
    "on_batch_end": "write on_train_batch_end",
    "on_batch_start": "write on_train_batch_start",
    "on_epoch_end": "write on_train_epoch_end, or on_validation_epoch_end",
    "on_epoch_start": "write on_train_epoch_start, or on_validation_epoch_start",
    "on_exception": "write it in a Callback",
    "on_keyboard_interrupt": "write on_exception",
    "on_pretrain_routine_end": "write on_fit_start",
    "on_pretrain_routine_start": "write on_fit_start",
    "on_train_batch_start that returns -1": "give limit_train_batches, or set should_stop",
    "to_onnx": "call torch.onnx.export(model, (inputs,), path)",
    "to_torchscript": "call torch.export.export(model, (inputs,))",
}


def sentence(name: str, where: str = "") -> str:
    """The sentence that refuses this name of Lightning and says what to do instead.

    where   the object or call that uses it, if the name alone does not say it
    """
    where = f" in {where}" if where else ""
    return (
        f"multigpu.trainer does not support Lightning's {name}{where}: {REFUSED[name]}, or "
        f"run the program with Lightning itself."
    )


def refuse(name: str, where: str = "") -> NoReturn:
    """Raise UserError with the sentence about this name."""
    raise UserError(sentence(name, where))


def refused_method(name: str) -> Callable[..., NoReturn]:
    """A method in place of one that is not here."""
    return lambda *args, **keywords: refuse(name)


def refuse_arguments(owner: str, arguments: Mapping[str, Any]) -> None:
    """Raise the error for arguments that `owner`, a class or method, does not have.

    An argument of Lightning's that is None, False or 0 asks for nothing, and is accepted.
    """
    for name, value in arguments.items():
        if name not in REFUSED:
            raise TypeError(f"{owner} has no argument {name!r}")
        if value:
            refuse(name, owner)


def refused_names(module: str) -> Callable[[str], type]:
    """The `__getattr__` of a module: a refused class can be imported, and raises UserError
    when it is made. Programs import what they use only with some of their flags.
    """

    def __getattr__(name: str) -> type:
        if name in REFUSED:
            return unsupported(name, sentence(name))
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
