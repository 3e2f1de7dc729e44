"""How a step's time grows with the number of GPUs: predicted, and what bends it.

    from multigpu.scaling import predict, report
    print(report.text(predict("resnet50", "A100-80GB", "NVLink3", "HDR200")))

`multigpu scaling` is the same at the command line. It models data parallelism with DDP.
"""

from multigpu.scaling import laws, report
from multigpu.scaling.loader import Loader
from multigpu.scaling.measured import Measured
from multigpu.scaling.prediction import Prediction, predict

__all__ = ["Loader", "Measured", "Prediction", "laws", "predict", "report"]
