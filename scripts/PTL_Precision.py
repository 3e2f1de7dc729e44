"""Lesson 11: train by a Trainer in the precision that you name: 32, 64, 16 or bf16.

    python scripts/PTL_Precision.py --precision bf16                on a GPU, else on the CPU
    multigpu virtual --gpus 1 scripts/PTL_Precision.py --precision 16     as on a V100
    multigpu prove --gpus 2 scripts/PTL_Precision.py --precision 64       two GPUs equal one?
    sbatch slurm/PTL_Precision.slurm                                on a node of a cluster

16 and bf16 are mixed: the Trainer opens autocast, and for 16 it scales the loss. The classes
do not mention precision. bf16 needs an A100 or a newer GPU, or the CPU. The script needs
multigpu: Lightning 2 does not call training_step_end.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import multigpu.trainer as L

# Design the model


class CNN(nn.Module):
    """Images (batch, 1, 8, 8) → logits (batch, 10). Smooth, so that rounding stays small."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        x = torch.tanh(self.conv1(images))
        x = torch.tanh(self.conv2(x))
        x = torch.tanh(self.fc1(x.flatten(1)))
        return self.fc2(x)


class LitCNN(L.LightningModule):
    """The CNN, its loaders, the loss, what is evaluated, and the optimizer."""

    def __init__(self, train, test, batch_size=64, lr=0.05, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.cnn = CNN()
        self.train_set, self.test_set = train, test
        self.batch_size, self.lr, self.seed = batch_size, lr, seed

    def train_dataloader(self):
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        if self.batch_size % (ranks * self.trainer.num_devices):
            raise SystemExit("--batch-size must be a multiple of the number of devices.")
        sampler = DistributedSampler(self.train_set, ranks, rank, seed=self.seed)
        return DataLoader(self.train_set, self.batch_size // ranks, sampler=sampler)

    def val_dataloader(self):
        return DataLoader(self.test_set, batch_size=256)

    def on_train_batch_start(self, batch, batch_idx):
        self.first = batch_idx * self.batch_size  # image of this step, in the epoch's order

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.cnn(images), labels, reduction="none")

    # In dp each GPU's replica calls training_step; this gets the losses of all of them.
    def training_step_end(self, losses):
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        total = len(self.train_set)
        # The sampler repeats images until all ranks have equally many. Repeats get weight 0.
        row = self.first + rank + ranks * torch.arange(len(losses), device=losses.device)
        loss = (losses * (row < total)).sum()
        self.log("loss", loss / total, on_step=False, on_epoch=True, reduce_fx="sum")
        # DDP divides by the ranks, so this is the mean over the images of all ranks.
        return loss * ranks / min(self.batch_size, total - self.first)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.cnn(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        self.log("test_loss", F.cross_entropy(logits, labels), batch_size=len(labels))
        self.log("accuracy", accuracy, batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


# Read in the data


def read_digits(path=None):
    """Train and test set: scikit-learn's digits of 8 × 8 pixels, or an .npz like them."""
    if path:
        data = np.load(path)
        arrays = [data[name] for name in ("x_train", "y_train", "x_test", "y_test")]
    else:
        digits = load_digits()
        order = np.random.RandomState(0).permutation(len(digits.target))
        x, y = digits.images[order] / 16, digits.target[order]
        arrays = [x[:1437], y[:1437], x[1437:], y[1437:]]
    images, labels, test_images, test_labels = map(torch.as_tensor, arrays)
    train = TensorDataset(images.float().unsqueeze(1), labels.long())
    return train, TensorDataset(test_images.float().unsqueeze(1), test_labels.long())


# Train and evaluate


class Epochs(L.Callback):
    """Prints a line for each epoch, and keeps its numbers in `history`."""

    def __init__(self):
        self.history = []

    def on_fit_start(self, trainer, module):
        devices = trainer.world_size * trainer.num_devices
        trainer.print(f"{devices} × {module.device.type}, precision {trainer.precision}")

    def on_train_epoch_end(self, trainer, module):
        names = ("loss", "test_loss", "accuracy")
        found = {name: float(trainer.callback_metrics[name]) for name in names}
        if not np.isfinite(found["loss"]):
            raise SystemExit(f"The loss is {found['loss']}: lower --lr, or take bf16.")
        self.history.append(found)
        line = f"loss {found['loss']:.4f}, accuracy {found['accuracy']:.4f}"
        trainer.print(f"epoch {len(self.history)}: {line}", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Train a CNN in 16, 32 or 64 bit.")
    parser.add_argument("--precision", default="32", help="32, 64, 16, bf16, 16-true, …")
    parser.add_argument("--strategy", choices=("auto", "dp", "ddp"), default="auto")
    parser.add_argument("--devices", type=int, help="default: all GPUs, or the launcher's")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, in all")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PTL_Precision"))
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1:
        parser.error("--epochs and --batch-size are from 1 up")
    try:
        train, test = read_digits(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()  # it is writable
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))

    # Set up the ranks: the Trainer finds them, or starts them when fit begins
    epochs = Epochs()
    trainer = L.Trainer(
        precision=args.precision,
        strategy=args.strategy,  # auto: ddp, if there are several devices
        devices=args.devices or "auto",
        max_epochs=args.epochs,
        callbacks=[epochs],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = LitCNN(train, test, args.batch_size, args.lr, args.seed)
    trainer.fit(module)
    if trainer.is_global_zero:
        torch.save(module.cnn.cpu().state_dict(), args.out / "model.pt")
        numbers = {**epochs.history[-1], "epochs": epochs.history}
        (args.out / "metrics.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main()
