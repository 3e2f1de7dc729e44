"""The longer experiments of PTL_NodeBatch: a step of the script's module on several ranks."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import multigpu
import multigpu.trainer as L
from multigpu import proof

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from PTL_NodeBatch import accuracy, read_digits

__all__ = ["accuracy", "difference", "first_batch", "read_digits", "shares", "train"]
difference = proof.difference


def first_batch(digits: TensorDataset, images: int) -> TensorDataset:
    """The first `images` of the digits, so that an epoch is one step."""
    return TensorDataset(*digits[:images])


def shares(values: list[float]) -> str:
    """Shares as text: 0.57, 0.56 and 0.61."""
    *first, last = (f"{value:.2f}" for value in values)
    return f"{', '.join(first)} and {last}"


def train(module: L.LightningModule, strategy: str) -> nn.Module:
    """In a rank: train the module for an epoch. Returns its encoder, on the CPU.

    strategy   "ddp": the ranks compute on the CPU. "ddp2": each rank is a node of its own,
               with two virtual GPUs
    """
    devices: int | str = "auto"
    if strategy == "ddp2":
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ["GROUP_RANK"] = os.environ["RANK"]
        devices = len(multigpu.gpus(2, gpu="V100-16GB"))
    torch.set_num_threads(1)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="gpu" if strategy == "ddp2" else "cpu",
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return module.encoder.cpu()
