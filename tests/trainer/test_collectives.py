"""Ranks exchange values and decide together: all_gather, stopping, hooks that wait for all."""

from collections import namedtuple

import pytest
import regression_net
import small_net
import torch
from numbered_rows import Net, Rows, changed, trainer
from refusals import outcome, user_error
from torch.utils.data import DataLoader

from multigpu import launch

pytestmark = pytest.mark.filterwarnings("ignore")
Pair = namedtuple("Pair", "z squares")


class Contrast(regression_net.Net):
    """A loss over all ranks' rows, as SimCLR's."""

    def training_step(self, batch, batch_idx):
        z = self.layer(batch[0])
        found = self.all_gather({"pair": Pair(z, [z**2])}, sync_grads=True)["pair"]
        return (found.z.mean() - 3.0) ** 2 + found.squares[0].mean()

    def on_before_optimizer_step(self, optimizer):
        self.gradient = self.layer.weight.grad.clone()


class Watching(small_net.Net):
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


class Predicting(small_net.Net):
    """Gathers one number in hooks that each rank calls once."""

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def on_predict_epoch_end(self):
        self.gathered = self.all_gather(torch.ones(1))

    def on_validation_end(self):
        self.gathered = self.all_gather(torch.ones(1))


class Collective(small_net.Net):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["ranks"] = float(self.trainer.strategy.all_gather(torch.ones(1)).sum())


def stopped_alone(folder: str, rank: int, hook: str) -> tuple[int, list[int]]:
    """Rank 1 alone sets should_stop in `hook`. Returns the steps, and when it validated."""
    validations = []

    def stop(net, *_):
        if rank == 1 and net.trainer.global_step in (2, 3, 6):
            net.trainer.should_stop = True

    def validated(net):
        validations.append(net.trainer.global_step)
        if hook == "on_validation_end":
            stop(net)

    hooks = {"on_validation_end": validated}
    if hook != "on_validation_end":
        hooks[hook] = stop
    model = changed(**hooks)
    two = {"strategy": "ddp", "devices": 2, "num_sanity_val_steps": 0}
    run = trainer(folder, max_epochs=5, val_check_interval=3, **two)
    run.fit(model, DataLoader(Rows(24), 2), DataLoader(Rows(4), 2))
    return run.global_step, validations


def exchanges(folder: str) -> dict:
    two = {"strategy": "ddp", "devices": 2}
    gathering = Net(val=lambda net, batch, batch_idx: net.all_gather(batch))
    even = Net(val=lambda net, batch, batch_idx: net.rows.append(net.all_gather(batch).shape))
    found = {
        "stopped alone": {
            hook: stopped_alone(folder, launch.find_world().rank, hook)
            for hook in ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")
        },
        "refused": [
            user_error(
                lambda n=n: trainer(folder, **two).validate(
                    gathering, DataLoader(Rows(n), 3), verbose=False
                )
            )
            for n in (10, 9)
        ],
    }
    trainer(folder, **two).validate(even, DataLoader(Rows(8), 2), verbose=False)
    found["evenly gathered"] = tuple(even.rows[1])

    for by_row in (False, True):
        model = Watching(by_row)
        found["gathered", by_row] = outcome(
            lambda model=model: small_net.cpu(strategy="ddp").validate(
                model, DataLoader(small_net.rows(10), 4), verbose=False
            )
        )
        found["shape", by_row] = tuple(getattr(model, "gathered", torch.empty(0)).shape)

    loader = DataLoader(small_net.rows(9), 3)
    for stage in ("predict", "validate"):
        model = Predicting()
        found[stage] = outcome(
            lambda model=model, stage=stage: getattr(small_net.cpu(strategy="ddp"), stage)(
                model, loader
            )
        )
        found[stage, "shape"] = tuple(getattr(model, "gathered", torch.empty(0)).shape)

    model = Contrast()
    regression_net.trained(model, regression_net.batches(8), strategy="ddp", max_steps=1)
    found["gathered"] = model.gradient

    run = small_net.cpu(strategy="ddp")
    run.fit(Collective(), DataLoader(small_net.rows(8), 2))
    run.save_checkpoint(f"{folder}/mine.ckpt")
    found["saved by"] = torch.load(f"{folder}/mine.ckpt")["ranks"]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks finds in `exchanges`."""
    return launch.call(exchanges, 2, str(tmp_path_factory.mktemp("ranks")))


def of_all(z: torch.Tensor) -> torch.Tensor:
    return (z.mean() - 3.0) ** 2 + (z**2).mean()


def test_gradients_through_all_gather_are_those_of_one_process(ranks):
    model = regression_net.Net()
    of_all(model.layer(regression_net.rows(8).tensors[0])).backward()
    for rank in ranks:
        assert torch.allclose(rank["gathered"], model.layer.weight.grad)


def test_a_collective_that_would_hang_is_refused(ranks):
    shapes, numbers = ranks[0]["refused"]
    assert "different shapes" in shapes
    assert "different numbers of batches" in numbers
    assert all(rank["evenly gathered"] == (2, 2, 1) for rank in ranks)


def test_at_an_epochs_end_ranks_may_gather_what_has_one_shape(ranks):
    assert ranks[0]["gathered", False] == "nothing", "though they had 2 batches and 1"
    assert ranks[0]["shape", False] == ranks[1]["shape", False] == (2, 1)
    assert "different shapes" in ranks[0]["gathered", True]


@pytest.mark.parametrize("stage", ["predict", "validate"])
def test_hooks_that_each_rank_calls_once_may_gather(ranks, stage):
    """The ranks have two batches and one."""
    assert [rank[stage, "shape"] for rank in ranks] == [(2, 1), (2, 1)], ranks[0][stage]


@pytest.mark.parametrize(
    ("hook", "steps", "validations"),
    [
        ("on_train_batch_end", 2, [2]),
        ("on_validation_end", 3, [3]),
        ("on_train_epoch_end", 6, [3, 6]),
    ],
)
def test_a_rank_that_wants_to_stop_does_not_validate_alone(ranks, hook, steps, validations):
    """It would wait for the others in the validation, and they for it in the next step."""
    assert [rank["stopped alone"][hook] for rank in ranks] == [(steps, validations)] * 2


def test_a_hook_may_hold_a_collective_while_a_checkpoint_is_made(ranks):
    assert ranks[0]["saved by"] == 2.0
