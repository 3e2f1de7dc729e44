"""save_hyperparameters() keeps what Lightning's keeps: the same classes with both mixins."""

import copy
import pickle
from argparse import Namespace

import lightnings
import plain_net
import pytest
import torch
from torch.utils.data import DataLoader

import multigpu.trainer
from multigpu.errors import UserError
from multigpu.trainer.hyperparameters import AttributeDict, HyperparametersMixin
from multigpu.trainer.loggers.logger import DummyLogger


@pytest.fixture(scope="module")
def lightning():
    return lightnings.package()


def objects(mixin):
    """Objects of classes as users write them, with this mixin."""

    class Base(mixin, torch.nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()

    class All(Base):
        def __init__(self, a, b=2, *, c=3):
            super().__init__()
            self.save_hyperparameters()

    class Named(Base):
        def __init__(self, a, b, c=3):
            super().__init__()
            self.save_hyperparameters("a", "c")

    class Ignored(Base):
        def __init__(self, a, b, c=3):
            super().__init__()
            self.save_hyperparameters(ignore=["a", "b"])

    class Keywords(Base):
        def __init__(self, a, *rest, **more):
            super().__init__()
            self.save_hyperparameters()

    class Container(Base):
        def __init__(self, first, config):
            super().__init__()
            self.save_hyperparameters(config)

    class Late(Base):
        def __init__(self, a):
            super().__init__()
            # A local variable is not an argument.
            b = 7
            a = a + b
            self._set_up()

        def _set_up(self):
            self.save_hyperparameters()

    class Parent(Base):
        def __init__(self, a, b=2):
            super().__init__()
            self.save_hyperparameters()

    class Child(Parent):
        def __init__(self, c, b=5):
            super().__init__(c * 2, b=b + 1)

    class Grandchild(Child):
        def __init__(self, d, **kwargs):
            super().__init__(d + 1, **kwargs)
            self.save_hyperparameters(ignore=["b"])

    config = {"x": 1, "y": "z"}
    return [
        All(1),
        All(1, c=5),
        Named(1, 2),
        Ignored(1, 2),
        Keywords(1, 2, 3, k=4),
        Container(1, config),
        Container(1, Namespace(**config)),
        Late(1),
        Parent(1),
        Child(3),
        Grandchild(1),
    ]


def test_the_same_hyperparameters_as_lightnings(lightning):
    originals = objects(lightning.pytorch.core.mixins.HyperparametersMixin)
    for original, replacement in zip(originals, objects(HyperparametersMixin), strict=True):
        name = type(replacement).__name__
        assert dict(replacement.hparams) == dict(original.hparams), name
        assert list(replacement.hparams) == list(original.hparams), name


def modules(library):
    """LightningModules that save their hyperparameters in different ways."""

    class Small(library.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    class All(Small):
        def __init__(self, a, b=2):
            super().__init__()
            self.save_hyperparameters()

    class Container(Small):
        def __init__(self, first, config):
            super().__init__()
            self.save_hyperparameters(config)

    class NotLogged(Small):
        def __init__(self, a):
            super().__init__()
            self.save_hyperparameters(logger=False)

    config = {"x": 1}
    return [All(1), Container(1, config), NotLogged(1)]


def recorder(base):
    """A logger of this base class that keeps the hyperparameters it gets."""

    class Recorder(base):
        def __init__(self):
            super().__init__()
            self.logged = []

        def log_hyperparams(self, params, *args, **kwargs):
            self.logged.append(dict(params))

    return Recorder()


@pytest.mark.filterwarnings("ignore")
def test_the_same_hyperparameters_reach_loggers_and_checkpoints(lightning, tmp_path):
    """A checkpoint also holds the name of the argument that the hyperparameters were in."""
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 2)))
    results = []
    for library, base in (
        (lightning, lightning.pytorch.loggers.logger.DummyLogger),
        (multigpu.trainer, DummyLogger),
    ):
        for module in modules(library):
            logger = recorder(base)
            trainer = library.Trainer(
                accelerator="cpu",
                max_steps=1,
                logger=logger,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module, rows)
            trainer.save_checkpoint(tmp_path / "one.ckpt")
            content = torch.load(tmp_path / "one.ckpt", weights_only=False)
            saved = dict(content.get("hyper_parameters", {}))
            name = content.get("hparams_name")
            results.append((type(module).__name__, logger.logged, saved, name))
    half = len(results) // 2
    assert results[half:] == results[:half]
    assert ("NotLogged", [], {"a": 1}, "kwargs") in results[half:]
    assert ("Container", [{"x": 1}], {"x": 1}, "config") in results[half:]


def test_an_attribute_dict():
    values = AttributeDict(lr=0.1, name="a")
    values.momentum = 0.9
    assert values == {"lr": 0.1, "name": "a", "momentum": 0.9}
    assert type(copy.deepcopy(values)) is AttributeDict
    assert type(pickle.loads(pickle.dumps(values))) is AttributeDict
    assert not hasattr(values, "nothing")


@pytest.mark.parametrize("args", [["learning_rat"], [0.1], [{"a": 1}, {"b": 1}]])
def test_wrong_arguments_of_save_hyperparameters(args):
    class Model(HyperparametersMixin):
        def __init__(self, learning_rate, net=None):
            self.save_hyperparameters(*args)

    with pytest.raises(UserError, match="save_hyperparameters"):
        Model(0.1)


def test_a_hyperparameter_that_no_checkpoint_can_contain(tmp_path):
    class Unpicklable(plain_net.Net):
        def __init__(self, lr=0.1, function=lambda x: x + 1):
            super().__init__()
            self.save_hyperparameters()

    module = Unpicklable()
    run = plain_net.trainer(tmp_path)
    with pytest.warns(UserWarning, match=r"'function'.*cannot be pickled"):
        run.fit(module, DataLoader(plain_net.rows(), 4))
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt")["hyper_parameters"] == {"lr": 0.1}
