"""torchtune's recipe again, with tensor parallelism over all ranks: all read the same rows."""

import os

import torch
import torchtune_recipe
from omegaconf import OmegaConf

RANKS = int(os.environ["WORLD_SIZE"])
CONFIG = {
    **torchtune_recipe.CONFIG,
    "log_level": "INFO",
    "batch_size": torchtune_recipe.ROWS,
    "tensor_parallel_dim": RANKS,
    "tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"},
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    "model": {**torchtune_recipe.CONFIG["model"], "num_kv_heads": 2},
}

if __name__ == "__main__":
    # The recipe gives the number of its device, which a CPU has not.
    barrier = torch.distributed.barrier
    torch.distributed.barrier = lambda device_ids=None: barrier()
    torchtune_recipe.train(OmegaConf.create(CONFIG))
