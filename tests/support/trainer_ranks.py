"""Many short runs in one pair of ranks, for the tests of the Trainer's rules."""

import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import multigpu.trainer as L
from multigpu.errors import UserError


class Rows(Dataset):
    """Row i is i, so that a test sees which rows came."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, place):
        return torch.tensor([float(place)])


class Net(L.LightningModule):
    def __init__(self, **steps):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rows, self.steps = [], steps

    def training_step(self, batch, batch_idx):
        self.rows.append(batch.flatten().int().tolist())
        if "train" in self.steps:
            self.steps["train"](self, batch, batch_idx)
        return self.layer(batch).square().mean() * 1e-3

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.rows.append(batch.flatten().int().tolist())
        self.log_dict({"mean": batch.mean(), "index": float(batch_idx)})
        self.log("sum", batch.sum(), reduce_fx="sum")
        self.log("max", batch.max(), reduce_fx=max)
        self.log("min", batch.min(), reduce_fx="min")
        if "val" in self.steps:
            self.steps["val"](self, batch, batch_idx)

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"rows": batch.flatten(), "index": batch_idx}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class Stream(IterableDataset):
    """As many rows as it is told, and no length."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return (torch.tensor([float(i)]) for i in range(self.n))


class Backwards(Sampler):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n - 1, -1, -1))

    def __len__(self):
        return self.n


def trainer(folder, **arguments):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    wide = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return L.Trainer(**{**quiet, **wide, **arguments})


def sentence(function):
    try:
        function()
    except UserError as error:
        return str(error)
    return ""


def evaluated(folder, **arguments):
    """10 rows in batches of 3: rank 0 has two batches of 3, rank 1 one of 3 and one of 1."""
    net = Net()
    run = trainer(folder, **arguments)
    reported = run.validate(net, DataLoader(Rows(10), 3), verbose=False)
    seen, net.rows = net.rows, []
    tested = run.test(
        net, [DataLoader(Rows(7), 2, shuffle=True), DataLoader(Rows(3), 3)], verbose=False
    )
    predicted = run.predict(net, DataLoader(Rows(10), 3))
    several = run.predict(net, [DataLoader(Rows(5), 2), DataLoader(Rows(2), 2)])
    limited = trainer(folder, **arguments, limit_predict_batches=3)
    return {
        "metrics": reported,
        "seen": seen,
        "tested": tested,
        "tested rows": net.rows,
        "predicted": [(out["index"], out["rows"].tolist()) for out in predicted],
        "several": [[out["rows"].tolist() for out in loader] for loader in several],
        "not wanted": (
            run.predict(net, DataLoader(Rows(4), 2), return_predictions=False),
            run.return_predictions,
        ),
        "limited": len(limited.predict(net, DataLoader(Rows(10), 3))),
        "streamed": len(run.predict(net, DataLoader(Stream(4), 2))),
    }


def order(folder, loader, **arguments):
    """Which rows this rank trains on, epoch after epoch."""
    L.seed_everything(5, verbose=False)
    net = Net()
    trainer(folder, max_epochs=2, **arguments).fit(net, loader)
    return net.rows


def log_differently(folder, rank, **arguments):
    def step(net, batch, batch_idx):
        net.log("both", 1.0 + rank, on_step=True, on_epoch=True, sync_dist=True)
        net.log(
            "this" if rank else "that", 5.0 + rank, on_step=True, on_epoch=True, sync_dist=True
        )
        net.log("mine", 1.0 + rank, on_step=False, on_epoch=True, rank_zero_only=True)
        if batch_idx == 1 and rank == 1:
            net.log("seldom", 4.0, on_step=False, on_epoch=True, reduce_fx="sum")

    run = trainer(folder, log_every_n_steps=1, **arguments)
    run.fit(Net(train=step), DataLoader(Rows(8), 2))
    return {name: float(value) for name, value in run.callback_metrics.items()}


def saved(folder, **arguments):
    """Who wrote, and under which name."""
    wrote, real = [], torch.save

    def note(content, path, **rest):
        if isinstance(path, Path):  # else it is a message to another rank
            wrote.append(path.name)
        real(content, path, **rest)

    torch.save = note
    saver = L.callbacks.ModelCheckpoint(folder, filename="kept")
    trainer(folder, callbacks=[saver], enable_checkpointing=True, **arguments).fit(
        Net(), DataLoader(Rows(8), 2)
    )
    torch.save = real
    return {
        "wrote": wrote,
        "there": sorted(os.listdir(folder)),
        "best": Path(saver.best_model_path).name,
    }


def stopped(folder, rank, **arguments):
    def step(net, batch, batch_idx):
        net.trainer.should_stop = rank == 1 and batch_idx == 1

    run = trainer(folder, max_epochs=5, **arguments)
    run.fit(Net(train=step), DataLoader(Rows(16), 2))
    return run.global_step


def everything(folder):
    rank, two = int(os.environ["RANK"]), {"strategy": "ddp", "devices": 2}
    gathering = Net(val=lambda net, batch, batch_idx: net.all_gather(batch))
    even = Net(val=lambda net, batch, batch_idx: net.rows.append(net.all_gather(batch).shape))
    found = {
        "evaluated": evaluated(folder, **two),
        "logged": log_differently(folder, rank, **two),
        "saved": saved(Path(folder) / "saved", **two),
        "stopped": stopped(folder, rank, **two),
        "backwards": order(folder, DataLoader(Rows(8), 2, sampler=Backwards(8)), **two),
        "in order": order(folder, DataLoader(Rows(8), 2), **two),
        "shuffled": order(folder, DataLoader(Rows(8), 2, shuffle=True), **two),
        "weighted": order(
            folder,
            DataLoader(Rows(8), 2, sampler=torch.utils.data.RandomSampler(Rows(8), True, 6)),
            **two,
        ),
        "not shared": order(
            folder, DataLoader(Rows(4), 2), use_distributed_sampler=False, **two
        ),
        "overfit": order(
            folder, DataLoader(Rows(8), 2, shuffle=True), overfit_batches=1, **two
        ),
        "streams": order(folder, DataLoader(Stream(5 if rank else 3), 1), **two),
        "uneven loaders": order(
            folder, DataLoader(Rows(5 if rank else 3), 1), use_distributed_sampler=False, **two
        ),
        "an empty stream": order(folder, DataLoader(Stream(0 if rank else 3), 1), **two),
        "batch sampler": sentence(
            lambda: order(folder, DataLoader(Rows(8), batch_sampler=[[0, 1], [2, 3]]), **two)
        ),
        "gathered": [
            sentence(
                lambda n=n: trainer(folder, **two).validate(
                    gathering, DataLoader(Rows(n), 3), verbose=False
                )
            )
            for n in (10, 9)
        ],
    }
    trainer(folder, **two).validate(even, DataLoader(Rows(8), 2), verbose=False)
    found["evenly gathered"] = tuple(even.rows[1])
    return found


def refusal(function):
    with pytest.raises(UserError) as caught:
        function()
    reported = str(caught.value)
    assert "\n" not in reported and reported.endswith((".", "?")), reported
    return reported


def changed(**methods):
    return type("Changed", (Net,), methods)()
