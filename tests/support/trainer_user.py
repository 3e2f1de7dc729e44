"""One user's code that runs with Lightning's Trainer and with multigpu's.

`train(L, case, folder)` returns the results of a case: the loss of each step, the weights, the
metrics, the CSV rows. `python trainer_user.py LIBRARY FOLDER` trains
the cases of TWO on two ranks; LIBRARY is multigpu or lightning.
"""

import csv
import importlib
import os
import sys
import warnings
from pathlib import Path

import torch
from quiet import QUIET
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

LIBRARIES = {"multigpu": "multigpu.trainer", "lightning": "lightning"}
# case → (the Trainer's arguments, the module's, the data's)
CASES = {
    "plain": ({}, {}, {}),
    "accumulate": ({"accumulate_grad_batches": 2}, {}, {}),
    "accumulate, by step": ({"accumulate_grad_batches": 2}, {"schedule": "step"}, {}),
    "clip by norm": ({"gradient_clip_val": 0.05}, {}, {}),
    "clip by value": ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}, {}),
    "clip and accumulate": ({"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}, {}, {}),
    "scheduler by step": ({}, {"schedule": "step"}, {}),
    "scheduler every 2 steps": ({}, {"schedule": "every 2 steps"}, {}),
    "scheduler by epoch": ({}, {"schedule": "epoch"}, {}),
    "plateau": ({"max_epochs": 4}, {"schedule": "plateau"}, {}),
    "bf16": ({"precision": "bf16-mixed"}, {}, {}),
    "manual": ({}, {"manual": True}, {}),
    "validate twice an epoch": ({"val_check_interval": 0.5}, {}, {}),
    "validate every 2 batches": (
        {"val_check_interval": 2, "check_val_every_n_epoch": None},
        {},
        {},
    ),
    "limits": ({"limit_train_batches": 2, "limit_val_batches": 1}, {}, {}),
    "shares": ({"limit_train_batches": 0.7, "limit_val_batches": 0.5}, {}, {}),
    "shuffled": ({}, {}, {"shuffle": True}),
    "max_steps": ({"max_steps": 3, "accumulate_grad_batches": 2, "max_epochs": -1}, {}, {}),
    "seldom logged": ({"log_every_n_steps": 2}, {}, {}),
}
# Cases for one rank only.
ALONE = {
    "dropout": ({}, {"dropout": 0.5}, {"shuffle": True}),
    "a sampler": ({}, {}, {"weighted": True}),
    "workers": ({}, {}, {"shuffle": True, "num_workers": 1}),
    "64 bit": ({"precision": "64-true"}, {}, {}),
    "overfit": ({"overfit_batches": 2}, {}, {"shuffle": True}),
    "fast_dev_run": ({"fast_dev_run": 2}, {"schedule": "step"}, {}),
    "two val loaders": ({}, {}, {"val_loaders": 2}),
}
# Cases for two ranks. There Lightning shuffles the training data if the user does not, too;
# this Trainer keeps the user's order: all cases shuffle. limit_val_batches counts each rank's
# batches in Lightning, and here those of the whole data set: `train` drops it.
TWO = [
    "accumulate, by step", "clip by norm", "clip and accumulate", "scheduler every 2 steps",
    "plateau", "bf16", "manual", "validate twice an epoch", "limits", "max_steps",
    "seldom logged",
]  # fmt: skip


def trainer(L, root, **arguments):
    """A Trainer of L that prints and writes nothing, unless the arguments say so."""
    defaults = {"accelerator": "cpu", "max_epochs": 2, "default_root_dir": root}
    return L.Trainer(**QUIET | defaults | arguments)


def net(L, schedule=None, manual=False, dropout=0.0):
    """The user's module, as a subclass of L's."""

    class Net(L.LightningModule):
        def __init__(self, schedule=None, manual=False, dropout=0.0):
            super().__init__()
            self.save_hyperparameters()
            self.automatic_optimization = not manual
            self.body = torch.nn.Sequential(
                torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout)
            )
            self.head = torch.nn.Linear(8, 3)
            self.losses, self.ends = [], []

        def forward(self, x):
            return self.head(self.body(x))

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.item())
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
            self.log_dict(
                {"high": loss, "count": 1.0},
                on_step=False,
                on_epoch=True,
                reduce_fx="max",
                sync_dist=True,
            )
            self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
            if self.automatic_optimization:
                return {"loss": loss, "rows": len(batch[1])}
            first, second = self.optimizers()
            self.manual_backward(loss)
            first.step()
            if batch_idx % 2:
                second.step()
                second.zero_grad()
            first.zero_grad()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.ends.append((float(outputs["loss"]) if outputs else None, self.global_step))

        def on_train_epoch_end(self):
            self.log("steps", float(self.global_step), sync_dist=True)

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            scores = self(batch[0])
            self.log("val_loss", F.cross_entropy(scores, batch[1]), sync_dist=True)
            self.log(
                "hits",
                (scores.argmax(1) == batch[1]).float().sum(),
                reduce_fx="sum",
                sync_dist=True,
            )

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return self(batch[0]).argmax(1)

        def configure_optimizers(self):
            if self.hparams.manual:
                first = torch.optim.SGD(self.body.parameters(), 0.5)
                second = torch.optim.Adam(self.head.parameters(), 0.02)
                return first, second
            optimizer = torch.optim.SGD(self.parameters(), 0.5, momentum=0.9)
            kind = self.hparams.schedule
            if kind is None:
                return optimizer
            if kind == "plateau":
                scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                    optimizer, factor=0.1, patience=0, mode="max"
                )
                return {
                    "optimizer": optimizer,
                    "lr_scheduler": scheduler,
                    "monitor": "val_loss",
                }
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            config = {
                "scheduler": scheduler,
                "interval": "step" if "step" in kind else "epoch",
                "frequency": 2 if "2" in kind else 1,
            }
            return {"optimizer": optimizer, "lr_scheduler": config}

    return Net(schedule, manual, dropout)


def data(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())


def loaders(shuffle=False, weighted=False, val_loaders=1, **more):
    """The dataloader for training, and the one or the list for validation."""
    train = data(18, seed=1)
    val = data(16, seed=2)
    if weighted:
        more["sampler"] = WeightedRandomSampler(torch.arange(1.0, 19.0), 18)
    else:
        more["shuffle"] = shuffle
    vals = [DataLoader(val, 4) for _ in range(val_loaders)]
    return DataLoader(train, 4, **more), vals[0] if val_loaders == 1 else vals


def train(L, case, folder, **arguments):
    """The results of a fit of this case, by name; `arguments` are more of the Trainer's."""
    L.seed_everything(3, verbose=False)
    trainer_arguments, module_arguments, data_arguments = {**CASES, **ALONE}[case]
    trainer_arguments = dict(trainer_arguments)
    # On two ranks: see TWO.
    if "strategy" in arguments:
        data_arguments = {"shuffle": True}
        trainer_arguments.pop("limit_val_batches", None)
    module = net(L, **module_arguments)
    if trainer_arguments.get("precision") == "64-true":
        module = module.double()
    logger = L.pytorch.loggers.CSVLogger(folder, name=case.replace(" ", "_"), version=0)
    arguments = {"logger": logger, "log_every_n_steps": 1, **arguments, **trainer_arguments}
    run = trainer(L, folder, **arguments)
    run.fit(module, *loaders(**data_arguments))
    return {
        "losses": module.losses,
        "ends": module.ends,
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "at": (run.current_epoch, run.global_step),
        "rows": csv_rows(logger) if run.is_global_zero else [],
    }


def csv_rows(logger):
    """The rows of metrics.csv; none if the logger wrote none, as with fast_dev_run."""
    if not logger.log_dir:
        return []
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    which, folder = sys.argv[1:]
    L = importlib.import_module(LIBRARIES[which])
    if which == "lightning":
        import logging

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results = {}
    for case in TWO:
        results[case] = train(L, case, Path(folder) / which, strategy="ddp", devices=2)
    torch.save(results, Path(folder) / f"{which}{os.environ['LOCAL_RANK']}.pt")
