"""Lesson 09: train on many GPUs by a Trainer, which places, shards, synchronizes and saves.

    python scripts/PTL_multiGPU.py --devices 2             two ranks, on GPUs or the CPU
    multigpu prove scripts/PTL_multiGPU.py --devices 2     do they equal one?
    sbatch slurm/PTL_multiGPU.slurm                        on a cluster

With --resume results/PTL_multiGPU/last.ckpt a run continues after its last complete epoch.
In Lightning the same classes run with `import lightning as L`.
"""

import argparse
import json
import tempfile
import warnings
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
    """The CNN, the loss of a step, what is evaluated, and the optimizer."""

    def __init__(self, lr=0.05, seed=0):
        super().__init__()
        self.save_hyperparameters()  # into each checkpoint, for load_from_checkpoint
        torch.manual_seed(seed)
        self.cnn = CNN()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        batch_size = self.trainer.datamodule.batch_size
        total = len(self.trainer.datamodule.train)
        first = batch_idx * batch_size  # of this step's images, in the epoch's order
        # The sampler repeats images until all ranks have equally many. Repeats get weight 0.
        row = first + rank + ranks * torch.arange(len(labels), device=self.device)
        losses = F.cross_entropy(self.cnn(images), labels, reduction="none")
        loss = (losses * (row < total)).sum()
        # Added up over the batches and ranks of an epoch: the mean over its images.
        how = {"on_step": False, "on_epoch": True, "reduce_fx": "sum", "sync_dist": True}
        self.log("loss", loss.detach() / total, **how)
        # DDP divides by the ranks, so this is the mean over the images of all ranks.
        return loss * ranks / min(batch_size, total - first)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        hits = (self.cnn(images).argmax(1) == labels).sum()
        share = hits / len(self.trainer.datamodule.test)
        self.log("accuracy", share, reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)


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


class DigitsData(L.LightningDataModule):
    """The loaders of a rank. `batch_size` is the number of images in a step, in all."""

    def __init__(self, path=None, batch_size=64, seed=0):
        super().__init__()
        self.path, self.batch_size, self.seed = path, batch_size, seed

    def setup(self, stage):
        self.train, self.test = read_digits(self.path)

    def train_dataloader(self):
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        if self.batch_size % ranks:
            raise SystemExit(f"--batch-size must be a multiple of {ranks}, the ranks.")
        # With shuffle=True several ranks would read in another order than one. The Trainer
        # keeps a DistributedSampler, and calls its set_epoch.
        sampler = DistributedSampler(self.train, ranks, rank, seed=self.seed)
        return DataLoader(self.train, self.batch_size // ranks, sampler=sampler)

    def val_dataloader(self):
        return DataLoader(self.test, batch_size=256)


# Train and evaluate


class Epochs(L.Callback):
    """Prints a line for each epoch, and keeps its numbers in `history`, in checkpoints too."""

    def __init__(self):
        self.history = []

    def on_fit_start(self, trainer, module):
        where = f"{trainer.world_size} × {module.device.type}"
        trainer.print(f"{where}, {trainer.datamodule.batch_size} images a step", flush=True)

    def on_train_epoch_end(self, trainer, module):
        loss, accuracy = (float(trainer.callback_metrics[n]) for n in ("loss", "accuracy"))
        if not np.isfinite(loss):
            raise SystemExit(f"The loss is {loss}: lower --lr.")
        self.history.append({"loss": loss, "accuracy": accuracy})
        line = f"epoch {len(self.history)}: loss {loss:.4f}, accuracy {accuracy:.4f}"
        trainer.print(line, flush=True)

    def state_dict(self):
        return {"history": self.history}

    def load_state_dict(self, state):
        self.history = state["history"]


def main():
    parser = argparse.ArgumentParser(description="Train a CNN by a Trainer.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, in all")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", default="auto", help="of a node: a number, or -1 for all")
    parser.add_argument("--nodes", type=int, default=1, help="on which a launcher starts it")
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PTL_multiGPU"))
    parser.add_argument("--resume", metavar="FILE", help="go on from the last.ckpt of a run")
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1:
        parser.error("--epochs and --batch-size are from 1 up")
    try:
        read_digits(args.data)
        if args.resume:
            Path(args.resume).open("rb").close()
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()  # it is writable
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))
    # The folder has an earlier run's checkpoint: --resume needs it.
    warnings.filterwarnings("ignore", "Checkpoint directory|the checkpoints' folder")

    # Set up the ranks: the Trainer finds them, or starts them when fit begins
    epochs = Epochs()
    save = L.pytorch.callbacks.ModelCheckpoint(args.out, "last", enable_version_counter=False)
    trainer = L.Trainer(
        devices=args.devices,  # accelerator="auto": GPUs, or the CPU if there are none
        num_nodes=args.nodes,
        max_epochs=args.epochs,
        callbacks=[epochs, save],
        default_root_dir=args.out,  # the logger's files are in its folder lightning_logs
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = LitCNN(args.lr, args.seed)
    digits = DigitsData(args.data, args.batch_size, args.seed)
    trainer.fit(module, datamodule=digits, ckpt_path=args.resume)
    if trainer.is_global_zero:
        torch.save(module.cnn.cpu().state_dict(), args.out / "model.pt")
        numbers = {**epochs.history[-1], "epochs": epochs.history}
        (args.out / "metrics.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main()
