"""What the Trainer says about itself and its module, side by side with Lightning's."""

import pickle

import lightnings
import plain_net
import pytest
import torch
from torch.utils.data import DataLoader
from trainer_user import trainer
from user_methods import user

import multigpu.trainer as ours

pytestmark = pytest.mark.filterwarnings("ignore")
HOOKS = ("setup", "on_fit_start", "on_sanity_check_start", "on_train_start", "teardown")
BATCHES = tuple(
    f"on_{kind}_batch_start" for kind in ("train", "validation", "test", "predict")
)


def states(L, folder, stage):
    """What the Trainer's state is in each hook of a callback."""
    seen = []

    def method(name):
        def look(self, trainer, *args, **keywords):
            state = trainer.state
            stage = getattr(state.stage, "value", state.stage)  # Lightning's is an enum
            flags = (trainer.training, trainer.validating, trainer.testing, trainer.predicting)
            seen.append((name, state.fn == "fit", stage, flags))

        return look

    callback = type("Looks", (L.Callback,), {name: method(name) for name in HOOKS + BATCHES})
    run = trainer(L, folder, callbacks=[callback()], max_epochs=1)
    assert not run.state.finished
    getattr(run, stage)(user(L)())
    assert run.state.finished and run.state.stage is None
    return seen


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_the_state_in_each_hook_is_lightnings(tmp_path, stage):
    found, expected = (states(L, tmp_path, stage) for L in (ours, lightnings.package()))
    assert len(expected) > 3 and found == expected


def test_an_exception_interrupts(tmp_path):
    def training_step(self, batch, batch_idx):
        raise KeyError("x")

    for L in (ours, lightnings.package()):
        run = trainer(L, tmp_path)
        with pytest.raises(KeyError):
            run.fit(user(L, training_step=training_step)())
        assert run.state.fn == "fit" and not run.state.finished


def test_the_model_is_in_evaluation_mode_while_it_validates(tmp_path):
    class Looks(plain_net.Net):
        seen = ()

        def validation_step(self, batch, batch_idx):
            self.seen = (*self.seen, self.trainer.model.training, self.training)

    module = Looks()
    loader = DataLoader(plain_net.rows(), 8)
    run = plain_net.trainer(tmp_path)
    run.fit(module, loader, loader)
    assert set(module.seen) == {False}
    assert run.model is module and run.model.training


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_trainer_can_be_pickled(tmp_path, when):
    run = plain_net.trainer(tmp_path)
    loader = DataLoader(plain_net.rows(), 4)
    if when == "after":
        run.fit(plain_net.Net(), loader, loader)
    copy = pickle.loads(pickle.dumps(run))
    assert copy.global_step == run.global_step
    copy.max_epochs = 3
    copy.fit(plain_net.Net(), loader, loader)
    assert copy.current_epoch == 3


def test_toggling_leaves_alone_what_no_optimizer_holds(tmp_path):
    """Which parameters require gradients: inside, and after, `toggle_optimizer`."""

    def __init__(self):
        super(type(self), self).__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(2, 2)
        self.free = torch.nn.Linear(2, 2)
        self.recorded = []

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.layer, self.other)]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.recorded.append([p.requires_grad for p in self.parameters()])
            self.untoggle_optimizer(optimizer)
            self.recorded.append([p.requires_grad for p in self.parameters()])

    found = []
    for L in (ours, lightnings.package()):
        module = user(
            L,
            __init__=__init__,
            configure_optimizers=configure_optimizers,
            training_step=training_step,
        )()
        trainer(L, tmp_path, max_epochs=1, limit_val_batches=0).fit(module)
        found.append(module.recorded)
    assert found[0] == found[1]
    assert found[0][0] == [True, True, False, False, True, True]


def test_clip_gradients_has_the_trainers_values_as_defaults(tmp_path):
    class Clips(plain_net.Net):
        # In another order: Lightning gives them by name.
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_algorithm, gradient_clip_val
        ):
            self.arguments = (gradient_clip_val, gradient_clip_algorithm)
            self.clip_gradients(optimizer)
            self.norm = torch.cat([p.grad.ravel() for p in self.parameters()]).norm()

    module = Clips()
    loader = DataLoader(plain_net.rows(), 4)
    plain_net.trainer(tmp_path, gradient_clip_val=0.001).fit(module, loader)
    assert module.arguments == (0.001, None)
    assert float(module.norm) == pytest.approx(0.001, rel=1e-3)


def test_the_fit_loops_names(tmp_path):
    found = []
    for L in (ours, lightnings.package()):
        seen = []

        def training_step(self, batch, batch_idx, seen=seen):
            loop = self.trainer.fit_loop
            seen.append((loop.batch_idx, loop.max_epochs))
            return self.layer(torch.ones(1, 6)).sum()

        run = trainer(L, tmp_path, max_epochs=1, limit_val_batches=0, limit_train_batches=2)
        run.fit_loop.max_epochs = 2
        assert run.max_epochs == 2
        run.fit(user(L, training_step=training_step)())
        found.append(seen)
    assert found[0] == found[1]
    assert len(found[0]) == 4
