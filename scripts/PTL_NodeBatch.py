"""Lesson 10: ddp2, one process for each node: a loss that compares the rows of all its GPUs.

    python scripts/PTL_NodeBatch.py                   one node of two GPUs, if need be virtual
    bash lessons/10-strategies/two_nodes.sh scripts/PTL_NodeBatch.py     two nodes, simulated
    sbatch slurm/PTL_NodeBatch.slurm                  two nodes of a cluster

Does it equal a plain loop with the batches of two nodes?

    multigpu prove --reference "scripts/PTL_NodeBatch.py --serial 2" \
        bash lessons/10-strategies/two_nodes.sh scripts/PTL_NodeBatch.py
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


class Encoder(nn.Module):
    """Images (batch, 1, 8, 8) → 32 numbers that describe each (batch, 32)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 32)

    def forward(self, images):
        x = torch.tanh(self.conv1(images))
        x = torch.tanh(self.conv2(x))
        x = torch.tanh(self.fc1(x.flatten(1)))
        return self.fc2(x)


def moved(images):
    """The images, moved by a pixel to the right: another view of each."""
    return torch.cat([images[..., -1:], images[..., :-1]], dim=-1)


def info_nce(one, other):
    """The loss of two views: row i of `one` must be most similar to row i of `other`."""
    similarity = F.normalize(one, dim=1) @ F.normalize(other, dim=1).T / 0.2  # (rows, rows)
    return F.cross_entropy(similarity, torch.arange(len(one), device=one.device))


class Pairs(L.LightningModule):
    """Learns that two views of an image are more similar than views of other images."""

    def __init__(self, train, batch_size=64, lr=0.05, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = Encoder()
        self.train_set, self.batch_size, self.lr, self.seed = train, batch_size, lr, seed

    def train_dataloader(self):
        rank, ranks = self.trainer.global_rank, self.trainer.world_size  # of ddp2: nodes
        if self.batch_size % (ranks * self.trainer.num_devices):
            raise SystemExit("--batch-size must be a multiple of the number of all GPUs.")
        sampler = DistributedSampler(
            self.train_set, ranks, rank, seed=self.seed, drop_last=True
        )
        rows = self.batch_size // ranks
        return DataLoader(self.train_set, rows, sampler=sampler, drop_last=True)

    # A replica on each GPU of the node calls it with its rows.
    def training_step(self, batch, batch_idx):
        images, _ = batch
        return self.encoder(images), self.encoder(moved(images))

    # It gets the outputs of all replicas, joined: the rows of the node.
    def training_step_end(self, views):
        loss = info_nce(*views)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

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


# Train


def serial(train, nodes, epochs=1, batch_size=64, lr=0.05, seed=0):
    """Train in a plain loop, by the mean of the nodes' losses. Returns the encoder."""
    torch.manual_seed(seed)
    encoder = Encoder()
    optimizer = torch.optim.SGD(encoder.parameters(), lr, momentum=0.9)
    for epoch in range(epochs):
        # The order of DistributedSampler. What does not fill a batch is left out, as above.
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(len(train), generator=generator)
        for batch in order.split(batch_size)[: len(train) // batch_size]:
            images = [train.tensors[0][batch[node::nodes]] for node in range(nodes)]
            losses = [info_nce(encoder(rows), encoder(moved(rows))) for rows in images]
            optimizer.zero_grad()
            (sum(losses) / nodes).backward()
            optimizer.step()
    return encoder


# Evaluate


@torch.no_grad()
def accuracy(encoder, test):
    """The share of the images whose most similar moved image is their own."""
    images = test.tensors[0].to(next(encoder.parameters()).device)
    one = F.normalize(encoder(images), dim=1)
    other = F.normalize(encoder(moved(images)), dim=1)
    nearest = (one @ other.T).argmax(1).cpu()
    return (nearest == torch.arange(len(images))).double().mean().item()


class Epochs(L.Callback):
    """Prints a line for each epoch. `found` are the numbers of the last one."""

    def __init__(self, test):
        self.test = test

    def on_fit_start(self, trainer, module):
        nodes, each = trainer.world_size, trainer.num_devices
        trainer.print(f"{nodes} × {each} GPUs, {module.batch_size} images a step", flush=True)

    def on_train_epoch_end(self, trainer, module):
        loss = float(trainer.callback_metrics["loss"])
        if not np.isfinite(loss):
            raise SystemExit(f"The loss is {loss}: lower --lr.")
        self.found = {"loss": loss, "accuracy": accuracy(module.encoder, self.test)}
        line = "loss {loss:.4f}, accuracy {accuracy:.4f}".format(**self.found)
        trainer.print(f"epoch {trainer.current_epoch + 1}: {line}", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Match two views of an image, with ddp2.")
    parser.add_argument("--each", type=int, default=2, help="GPUs of a node")
    parser.add_argument("--serial", type=int, metavar="NODES", help="a plain loop instead")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, in all")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PTL_NodeBatch"))
    args = parser.parse_args()
    try:
        train, test = read_digits(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()  # it is writable
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))
    if args.epochs < 1 or args.each < 1 or not 1 <= args.batch_size <= len(train):
        parser.error(f"--epochs and --each are from 1 up, --batch-size at most {len(train)}")
    if args.serial:
        settings = (args.serial, args.epochs, args.batch_size, args.lr, args.seed)
        print(f"accuracy {accuracy(serial(train, *settings), test):.4f}")
        return

    # Set up the ranks: a launcher has started one for each node
    epochs = Epochs(test)
    trainer = L.Trainer(
        strategy="ddp2",
        devices=args.each,
        max_epochs=args.epochs,
        callbacks=[epochs],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Pairs(train, args.batch_size, args.lr, args.seed)
    trainer.fit(module)
    if trainer.is_global_zero:
        torch.save(module.encoder.cpu().state_dict(), args.out / "model.pt")
        (args.out / "metrics.json").write_text(json.dumps(epochs.found))


if __name__ == "__main__":
    main()
