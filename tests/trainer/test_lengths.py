"""How much a run does: epochs, steps, limits, and when it may stop."""

import warnings

import pytest
import regression_net
import small_net
import torch
from numbered_rows import Net, Rows, Stream, changed, ran, trainer
from regression_net import batches, trained
from torch.utils.data import DataLoader

from multigpu.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTHS = {
    "two epochs": ({"max_epochs": 2}, (10, 10, 2, 10)),
    "max_steps": ({"max_steps": 7, "max_epochs": -1}, (7, 5, 2, 7)),
    "max_steps, accumulated": (
        {"max_steps": 3, "max_epochs": -1, "accumulate_grad_batches": 2},
        (5, 5, 1, 3),
    ),
    "none": ({"max_epochs": 0}, (0, 0, 0, 0)),
    "fast_dev_run": ({"fast_dev_run": True, "max_epochs": 9}, (1, 1, 1, 1)),
    "fast_dev_run of 3": ({"fast_dev_run": 3}, (3, 3, 1, 3)),
    "limits": ({"limit_train_batches": 3, "limit_val_batches": 2}, (3, 2, 1, 3)),
    "nothing to validate": ({"limit_val_batches": 0}, (5, 0, 1, 5)),
    "sanity": ({"num_sanity_val_steps": 2}, (5, 7, 1, 5)),
    "every other epoch": ({"max_epochs": 3, "check_val_every_n_epoch": 2}, (15, 5, 3, 15)),
    "overfit": ({"overfit_batches": 2, "max_epochs": 2}, (4, 4, 2, 4)),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_how_much_is_run(tmp_path, case):
    arguments, expected = LENGTHS[case]
    assert ran(tmp_path, **arguments) == expected


def test_a_stream_of_unknown_length_is_trained_to_its_end(tmp_path):
    net = Net()
    run = trainer(tmp_path, max_epochs=2, accumulate_grad_batches=2)
    run.fit(net, DataLoader(Stream(5), 2), DataLoader(Stream(3), 2))
    assert run.global_step == 4 and net.rows == [[0, 1], [2, 3], [4], [0, 1], [2]] * 2


def test_estimated_stepping_batches(tmp_path):
    reported = []

    def configure_optimizers(self):
        reported.append(self.trainer.estimated_stepping_batches)
        return torch.optim.SGD(self.parameters(), 0.1)

    for arguments in (
        {"max_epochs": 3, "accumulate_grad_batches": 2},
        {"max_steps": 4, "max_epochs": 9},
        {"max_epochs": -1, "max_steps": 7},
    ):
        run = trainer(tmp_path, limit_val_batches=0, **arguments)
        run.fit(changed(configure_optimizers=configure_optimizers), DataLoader(Rows(10), 2))
        assert run.estimated_stepping_batches == reported[-1]
    assert reported == [9, 4, 7]


def stop(net, batch, batch_idx):
    net.trainer.should_stop = True


@pytest.mark.parametrize(
    ("least", "steps"),
    [({}, 1), ({"min_epochs": 2}, 10), ({"min_steps": 3}, 3), ({"min_epochs": 1}, 5)],
)
def test_should_stop_waits_for_the_least_that_was_asked_for(tmp_path, least, steps):
    assert ran(tmp_path, Net(train=stop), val=0, max_epochs=5, **least)[3] == steps


@pytest.mark.parametrize(
    "name", ["limit_train_batches", "limit_val_batches", "overfit_batches"]
)
def test_a_share_of_less_than_one_batch(name):
    with pytest.raises(UserError, match=f"{name}=0.05 of 10 batches .*less than one"):
        trained(regression_net.Net(), batches(), batches(), **{name: 0.05})
    assert trained(regression_net.Net(), batches(), batches(), **{name: 0.1}).global_step


def test_an_endless_loader_has_endless_steps():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from small_net.rows(4)

    model, found = small_net.make_net(), []
    model.on_train_start = lambda: found.append(model.trainer.estimated_stepping_batches)
    small_net.cpu(max_epochs=1).fit(model, DataLoader(Endless(), 2))
    assert found == [float("inf")]
    assert (
        small_net.cpu(fast_dev_run=True, check_val_every_n_epoch=5).check_val_every_n_epoch
        == 1
    )


class Two(regression_net.Net):
    """Two optimizers, which each step once a batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


def test_max_steps_ends_a_batch_that_makes_several():
    assert trained(Two(), max_steps=5, max_epochs=-1).global_step == 6
    assert trained(Two(), max_epochs=1).global_step == 20


def test_training_on_nothing():
    empty = DataLoader(regression_net.rows(3), 4, drop_last=True)
    with pytest.warns(UserWarning, match=r"no batches.* nothing is learned"):
        assert trained(regression_net.Net(), empty).global_step == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the user wants no batch
        run = trained(regression_net.Net(), batches(), batches(), limit_train_batches=0)
    assert run.global_step == 0
