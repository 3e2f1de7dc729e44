"""What configure_optimizers may return, and how an optimizer steps."""

import pytest
import torch
from small_net import fitted, make_net
from trainer_user import trainer
from user_methods import both, sgd, user

import multigpu.trainer as ours
from multigpu.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")


def stepped(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def with_scheduler(module, **more):
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": stepped(optimizer), **more}}


def in_two_lists(module, wrap=lambda scheduler: scheduler):
    optimizer = sgd(module)
    return [optimizer], [wrap(stepped(optimizer))]


def bare(module):
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": stepped(optimizer)}


def watching(module):
    optimizer = sgd(module)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
    return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}


FORMS = {
    "an optimizer": sgd,
    "a list": lambda module: [sgd(module)],
    "two lists": in_two_lists,
    "a dict": lambda module: {"optimizer": sgd(module)},
    "a dict, a scheduler": bare,
    "a dict of dicts": lambda module: with_scheduler(
        module, interval="step", frequency=2, name="mine"
    ),
    "a metric": watching,
    "none": lambda module: None,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_configure_optimizers_means_what_it_means_in_lightning(tmp_path, form):
    def note(self, *_):
        self.recorded.append(
            [
                group["lr"]
                for optimizer in self.trainer.optimizers
                for group in optimizer.param_groups
            ]
        )

    reported, steps, _ = both(
        tmp_path, configure_optimizers=FORMS[form], on_train_batch_end=note, on_train_end=note
    )
    assert len(reported) == 7 and steps == 6
    assert (reported[0] == reported[-1]) == (
        form in ("an optimizer", "a list", "a dict", "none")
    )


@pytest.mark.parametrize("wrong", ["sgd", 3, [1, 2], {"lr_scheduler": 1}, ()], ids=repr)
def test_another_form_of_configure_optimizers_is_refused(tmp_path, wrong):
    with pytest.raises(UserError, match="configure_optimizers returned"):
        trainer(ours, tmp_path).fit(user(ours, configure_optimizers=lambda self: wrong)())


def test_an_optimizer_step_of_the_users_own(tmp_path):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.recorded.append((epoch, batch_idx))
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    reported, steps, _ = both(tmp_path, optimizer_step=optimizer_step)
    assert reported == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] and steps == 6


class Counted(torch.optim.SGD):
    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


def test_an_optimizer_may_keep_plain_values():
    model = make_net()
    model.configure_optimizers = lambda: Counted(model.parameters(), 0.1)
    assert fitted(model).optimizers[0].state["steps"] == 4
