"""Data whose row i is the number i, a module that keeps its rows, and a quiet Trainer."""

import torch
from quiet import QUIET
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import multigpu.trainer as L


class Rows(Dataset):
    """Row i is i, so that a test sees which rows came."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, place):
        return torch.tensor([float(place)])


class Stream(IterableDataset):
    """A stream of `n` rows. It has no length."""

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


def changed(**methods):
    return type("Changed", (Net,), methods)()


def trainer(folder, **arguments):
    wide = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return L.Trainer(**{**QUIET, **wide, **arguments})


def ran(tmp_path, net=None, rows=10, val=10, **arguments):
    """(trained batches, validated batches, epochs, steps) of a fit in batches of 2."""
    seen = []
    net = net or changed(on_validation_batch_end=lambda self, *_: seen.append(1))
    run = trainer(tmp_path, **arguments)
    run.fit(net, DataLoader(Rows(rows), 2), DataLoader(Rows(val), 2) if val else None)
    return len(net.rows) - len(seen), len(seen), run.current_epoch, run.global_step


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
        "not wanted": run.predict(net, DataLoader(Rows(4), 2), return_predictions=False),
        "limited": len(limited.predict(net, DataLoader(Rows(10), 3))),
        "streamed": len(run.predict(net, DataLoader(Stream(4), 2))),
    }


def fit(tmp_path, net, loader=None, val=None, **arguments):
    return trainer(tmp_path, **arguments).fit(
        net, DataLoader(Rows(8), 2) if loader is None else loader, val
    )


def flat(batches):
    return [row for batch in batches for row in batch]
