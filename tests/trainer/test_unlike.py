"""Two ranks with different data, names or layers; and another fit after a failure."""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_net import Net, cpu, make_net, rows
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from multigpu import launch
from multigpu.errors import UserError
from multigpu.strategies import BaguaStrategy
from multigpu.trainer.loops import dataloaders


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, row):
        return row


class Drawn(Sampler):
    """A sampler of the user's, that draws by Python's or NumPy's random numbers."""

    def __init__(self, permuted):
        self.permuted = permuted

    def __len__(self):
        return 8

    def __iter__(self):
        return iter([int(row) for row in self.permuted(8)])


DRAWING = {"random": lambda n: random.sample(range(n), n), "numpy": np.random.permutation}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows(8))


class Watching(Net):
    """`seen`: what on_validation_epoch_end gathers of as many numbers as this rank has had
    rows, or had batches.
    """

    def __init__(self, by_row: bool):
        super().__init__()
        self.by_row, self.found = by_row, []

    def validation_step(self, batch, batch_idx):
        self.found.append(torch.ones(len(batch[0]) if self.by_row else 1))

    def on_validation_epoch_end(self):
        self.gathered = self.all_gather(torch.cat(self.found)[: None if self.by_row else 1])


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(1, 1)


class Freezes(Net):
    """The layer is frozen in the second epoch; momentum would move it on."""

    def __init__(self):
        super().__init__()
        self.second = torch.nn.Linear(3, 3)
        self.at: list = []

    def forward(self, x):
        return self.second(super().forward(x))

    def on_train_epoch_start(self):
        self.layer.requires_grad_(self.current_epoch == 0)
        self.at.append(self.layer[0].weight.detach().clone())

    def on_train_end(self):
        self.at.append(self.layer[0].weight.detach().clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def said(function) -> str:
    try:
        function()
    except (UserError, RuntimeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fails_at(step: int) -> Net:
    model = make_net()
    model.training_step = lambda batch, i: (
        F.cross_entropy(model(batch[0]), batch[1]) * (1 // (i - step))
    )
    return model


def on_two_ranks() -> dict:
    found: dict = {}
    rank = launch.find_world().rank
    random.seed(rank)
    np.random.seed(rank)
    for name, permuted in DRAWING.items():
        trainer = cpu(strategy="ddp")
        trainer.strategy.connect()
        loader = DataLoader(Numbers(), 4, sampler=Drawn(permuted))
        shard = dataloaders.prepare_for_rank(trainer, loader, training=True)
        found[name] = []
        for epoch in range(3):
            shard.batch_sampler.sampler.set_epoch(epoch)
            found[name].append([row for batch in shard for row in batch.tolist()])

    train, some = DataLoader(rows(8), 2), [DataLoader(rows(4), 2)] if rank else []
    found["validates"] = said(lambda: cpu(strategy="ddp").fit(make_net(), train, some))
    streams = DataLoader(Stream(), 2) if rank else train
    found["streams"] = said(
        lambda: cpu(strategy="ddp", use_distributed_sampler=False).fit(make_net(), streams)
    )

    for by_row in (False, True):
        model = Watching(by_row)
        found["gathered", by_row] = said(
            lambda model=model: cpu(strategy="ddp").validate(
                model, DataLoader(rows(10), 4), verbose=False
            )
        )
        found["shape", by_row] = tuple(getattr(model, "gathered", torch.empty(0)).shape)

    class Alone(Net):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 0:
                self.log("alone", 1.0, sync_dist=True)
            return super().training_step(batch, batch_idx)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cpu(strategy="ddp").fit(Alone(), train)
    found["alone"] = {
        str(warning.message) for warning in caught if "alone" in str(warning.message)
    }

    found["unused"] = said(lambda: cpu(strategy="ddp").fit(Unused(), train))
    freezes = Freezes()
    cpu(strategy="horovod", max_epochs=2).fit(freezes, train)
    found["moved"] = [
        float((a - b).abs().max()) for a, b in zip(freezes.at, freezes.at[1:], strict=False)
    ]

    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": scheduler}
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    for _ in range(2):
        cpu(strategy="horovod").fit(model, train)
    found["rates"] = [
        optimizer.param_groups[0]["lr"],
        *scheduler.base_lrs,
        type(optimizer).__name__,
    ]

    for name, strategy in (
        ("async", BaguaStrategy("async", sync_interval_ms=20)),
        ("horovod", "horovod"),
    ):
        reported = said(
            lambda strategy=strategy: cpu(strategy=strategy).fit(fails_at(1), train)
        )
        found[name] = (
            reported,
            said(lambda strategy=strategy: cpu(strategy=strategy).fit(make_net(), train)),
        )
    return found


@pytest.fixture(scope="module")
def two():
    return launch.call(on_two_ranks, 2)


@pytest.mark.parametrize("kind", DRAWING)
def test_a_sampler_of_any_random_numbers_is_dealt_out_anew_each_epoch(two, kind):
    epochs = list(zip(two[0][kind], two[1][kind], strict=True))
    assert all(sorted(first + second) == list(range(8)) for first, second in epochs)
    assert len({tuple(first) for first, _ in epochs}) == 3


def test_ranks_that_have_unlike_data_are_refused_together(two):
    assert "the number of validation dataloaders" in two[0]["validates"]
    assert "the kind of training dataloader (with a length, or without)" in two[0]["streams"]
    assert all("rank 1" in two[0][key] for key in ("validates", "streams"))
    assert all(
        rank[key].startswith("UserError") for rank in two for key in ("validates", "streams")
    )


def test_at_an_epochs_end_ranks_may_gather_what_has_one_shape(two):
    assert two[0]["gathered", False] == "nothing", "though they had 2 batches and 1"
    assert two[0]["shape", False] == two[1]["shape", False] == (2, 1)
    assert "different shapes ((4,), (6,))" in two[0]["gathered", True]


def test_a_name_that_one_rank_alone_logs_is_said_once(two):
    (reported,) = two[0]["alone"]
    assert (
        reported.startswith("self.log('alone', sync_dist=True)")
        and "some ranks" in reported
        and not two[1]["alone"]
    )


def test_parameters_that_the_loss_does_not_use_are_named(two):
    assert "'unused.weight' (one of 2)" in two[0]["unused"]
    assert "strategy='ddp_find_unused_parameters_true'" in two[0]["unused"]


def test_horovod_leaves_a_frozen_layer_where_it_is(two):
    assert two[0]["moved"][0] > 0 and two[0]["moved"][1] == 0


def test_horovod_scales_an_optimizer_once_that_is_used_twice(two):
    assert two[0]["rates"] == [0.2, 0.2, "SGD"]


@pytest.mark.parametrize("strategy", ["async", "horovod"])
def test_after_a_failure_another_fit_may_begin(two, strategy):
    assert two[0][strategy] == (
        "ZeroDivisionError: integer division or modulo by zero",
        "nothing",
    )
