"""Lesson 05's script with faults or records that the variable PLANT selects.

dropout           the model has dropout
raise=RANK:STEP   that rank raises an exception after that step; kill= kills it instead;
                  both write the time into the file $DEATH
count=FILE        rank 0 writes the number of gradient all-reduces
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import PT_CNN_MultiGPU as lesson

ITEMS = [item for item in os.environ.get("PLANT", "").split(",") if item]
PLANT = {name: value for name, _, value in (item.partition("=") for item in ITEMS)}
CNN = lesson.CNN


class Dropout(CNN):
    def forward(self, images):
        return super().forward(F.dropout(images, 0.2, self.training))


steps = 0


def after_step(*_):
    global steps
    steps += 1
    rank = int(os.environ.get("RANK", 0))
    for how in ("raise", "kill"):
        if PLANT.get(how) == f"{rank}:{steps}":
            Path(os.environ["DEATH"]).write_text(str(time.time()))
            if how == "raise":
                raise RuntimeError("planted fault")
            os.kill(os.getpid(), signal.SIGKILL)
    if "count" in PLANT and rank == 0:
        Path(PLANT["count"]).write_text(str(reductions))


reductions = 0


def counting_hook(state, bucket):
    global reductions
    reductions += 1
    return allreduce_hook(state, bucket)


class PlantedDDP(DistributedDataParallel):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if "count" in PLANT:
            self.register_comm_hook(None, counting_hook)


register_optimizer_step_post_hook(after_step)
lesson.DDP = PlantedDDP
lesson.CNN = Dropout if "dropout" in PLANT else CNN

if __name__ == "__main__":
    lesson.main(lesson.parse())
