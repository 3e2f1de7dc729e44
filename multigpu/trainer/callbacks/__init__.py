"""The callbacks. Import them from here, as from `lightning.pytorch.callbacks`."""

from multigpu.errors import unsupported_names
from multigpu.trainer.callbacks.accumulation import GradientAccumulationScheduler
from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.callbacks.early_stopping import EarlyStopping
from multigpu.trainer.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
from multigpu.trainer.callbacks.lambda_callback import LambdaCallback
from multigpu.trainer.callbacks.lr_monitor import LearningRateMonitor
from multigpu.trainer.callbacks.model_checkpoint import ModelCheckpoint
from multigpu.trainer.callbacks.model_summary import ModelSummary
from multigpu.trainer.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from multigpu.trainer.callbacks.prediction_writer import BasePredictionWriter
from multigpu.trainer.callbacks.progress import ProgressBar, TQDMProgressBar
from multigpu.trainer.callbacks.rich_progress import RichProgressBar
from multigpu.trainer.callbacks.timer import Timer
from multigpu.trainer.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "Callback",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "ProgressBar",
    "RichProgressBar",
    "TQDMProgressBar",
    "Timer",
    "WeightAveraging",
]

# Lightning's other callbacks, and what to use instead.
ALTERNATIVES = {
    "RichModelSummary": "use ModelSummary",
    "RichProgressBarTheme": "leave out theme: RichProgressBar has rich's own colours",
    "StochasticWeightAveraging": "use WeightAveraging, and torch's SWALR as scheduler",
    "GPUStatsMonitor": "use torch.cuda.memory_summary(), or multigpu.memory_held()",
    "LearningRateLogger": "use LearningRateMonitor, its newer name",
    "DeviceStatsMonitor": "use torch.cuda.memory_summary(), or multigpu.memory_held()",
    "ModelPruning": "use torch.nn.utils.prune",
    "LearningRateFinder": "train some steps with each of several learning rates, and compare",
    "BatchSizeFinder": "double batch_size until multigpu.memory_held() is near the capacity",
    "ThroughputMonitor": "measure the time between two on_train_batch_end in a Callback",
}


__getattr__ = unsupported_names(__name__, ALTERNATIVES)
