"""A step of SpeCo's drafter, sharded by FSDP2: verl_speco.trainer.base_trainer.

The trainer's step is the repository's. What it imports from verl, which needs vLLM and Ray, is
empty here; the drafter and the sums of its losses are small ones of our own, in float32.
"""

import asyncio
import sys
from types import SimpleNamespace

import tiny
import torch
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

tiny.absent(
    "verl", "verl.utils", "verl.utils.device", "verl.utils.fsdp_utils", "verl.utils.ulysses"
)
sys.modules["verl.utils.device"].get_device_name = lambda: "cpu"

from verl_speco.trainer.base_trainer import DrafterBaseTrainer  # noqa: E402


def losses(model, batch: dict, pad_size: int) -> dict:
    """The sums over this rank's tokens, as SpeCo's backends give them."""
    with torch.autocast("cpu", enabled=False):
        hidden = model(batch["rows"])
        counts = batch["counts"]
        v = functional.smooth_l1_loss(hidden, batch["rows"][:, :6], reduction="none")
        p = functional.cross_entropy(hidden, batch["tokens"], reduction="none")
        return {
            "total_local_vloss": (v.mean(1) * counts).sum(),
            "total_local_ploss": (p * counts).sum(),
            "local_num_tokens": counts.sum(),
            "v_weight": 0.5,
            "p_weight": 0.5,
        }


class Trainer(DrafterBaseTrainer):
    """The trainer without what it needs for rollouts."""

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.lr_scheduler = None
        self.backend = SimpleNamespace(compute_loss=losses)
        self.training_device_mesh = init_device_mesh("cpu", (get_world_size(),))
        self.training_process_group = self.data_parallel_process_group = None
        self.training_group_world_size = self.dp_group_world_size = 1
        self.use_ulysses_sp = False
        self.optimizer_steps_total = self.training_steps = self._current_pad_size = 0
        self._training_metric_sums = {}


def main() -> None:
    tiny.start()
    trainer = Trainer(fully_shard(tiny.model()))
    numbers = torch.Generator().manual_seed(2)
    for step, rows in enumerate(tiny.batches(32)):
        batch = {
            "rows": tiny.share(rows),
            "tokens": tiny.share(torch.randint(6, (32,), generator=numbers)),
            # Some of the tokens are not to be learned.
            "counts": tiny.share((torch.rand(32, generator=numbers) < 0.7).float()),
        }
        asyncio.run(trainer._training_step_on_batch(batch, step))
    tiny.end()


if __name__ == "__main__":
    main()
