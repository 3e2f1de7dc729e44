"""Does save_hyperparameters() keep what Lightning's keeps? The same classes are made over both mixins and compared."""

import copy
import functools
import pickle
from argparse import Namespace
from dataclasses import dataclass

import lightnings
import pytest
import torch

from multigpu.errors import UserError
from multigpu.trainer.checkpointing.attribute_dict import AttributeDict
from multigpu.trainer.checkpointing.hyperparameters import HyperparametersMixin


@pytest.fixture(scope="module")
def real():
    return lightnings.package().pytorch.core.mixins.HyperparametersMixin


def classes(mixin):
    """Classes as users write them, over this mixin; each with the arguments to make one."""

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
            self.save_hyperparameters(ignore="a" if c == 3 else ["a", "b"])

    class Keywords(Base):
        def __init__(self, a, *rest, **more):
            super().__init__()
            self.save_hyperparameters()

    class Container(Base):
        def __init__(self, first, config):
            super().__init__()
            self.save_hyperparameters(config)

    class Copied(Base):
        def __init__(self, first, config):
            super().__init__()
            self.save_hyperparameters(dict(config))

    class Late(Base):
        def __init__(self, a):
            super().__init__()
            b = 7  # a local, not an argument
            a = a + b
            self._set_up()

        def _set_up(self):
            self.save_hyperparameters()

    class Twice(Base):
        def __init__(self, a, b):
            super().__init__()
            self.save_hyperparameters("a")
            self.save_hyperparameters({"z": b})

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

    class Detour(Parent):
        def __init__(self, e):
            self._make(e)

        def _make(self, e):
            super().__init__(e)

    class Nothing(Base):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters()

    class Quiet(Base):
        def __init__(self, a):
            super().__init__()
            self.save_hyperparameters(logger=False)

    class Closure(Base):
        def __init__(self, a, b=1):
            super().__init__()
            self.f = lambda: (self, a)
            self.save_hyperparameters()

    class Empty(Base):
        def __init__(self, config):
            super().__init__()
            self.save_hyperparameters(config)

    @dataclass(eq=False)
    class Data(mixin):
        a: int
        b: int = 2

        def __post_init__(self):
            super().__init__()
            self.save_hyperparameters()

    config = {"x": 1, "y": "z"}
    return [
        *(
            All(1),
            All(1, c=5),
            All(a=[1]),
            Named(1, 2),
            Ignored(1, 2),
            Ignored(1, 2, c=4),
            Keywords(1, 2, 3, k=4),
        ),
        *(
            Container(1, config),
            Container(1, Namespace(**config)),
            Copied(1, config),
            Late(1),
            Twice(1, 2),
        ),
        *(
            Parent(1),
            Child(3),
            Grandchild(1),
            Grandchild(1, b=8),
            Detour(1),
            Nothing(),
            Quiet(1),
            Closure(4),
            Empty({}),
            Data(1),
        ),
    ]


def test_the_same_hyperparameters_as_lightnings(real):
    for theirs, mine in zip(classes(real), classes(HyperparametersMixin), strict=True):
        name = type(mine).__name__
        assert dict(mine.hparams) == dict(theirs.hparams), name
        assert list(mine.hparams) == list(theirs.hparams), name
        assert dict(mine.hparams_initial) == dict(theirs.hparams_initial), name
        assert mine._log_hyperparams == theirs._log_hyperparams, name
        assert repr(mine.hparams) == repr(theirs.hparams), name
        assert getattr(mine, "_hparams_name", None) == getattr(
            theirs, "_hparams_name", None
        ), name


def test_a_model_within_a_model_keeps_its_own_arguments_alone():
    """Lightning adds those of the outer one, whose __init__ runs around it."""

    class Inner(HyperparametersMixin):
        def __init__(self, a):
            self.save_hyperparameters()

    class Outer(HyperparametersMixin):
        def __init__(self, b):
            self.inner = Inner(b + 1)
            self.save_hyperparameters()

    outer = Outer(1)
    assert outer.hparams == {"b": 1} and outer.inner.hparams == {"a": 2}


def test_hparams_may_be_changed_and_the_initial_ones_not():
    class Model(HyperparametersMixin):
        def __init__(self, lr, layers):
            self.save_hyperparameters()

    model, layers = Model(0.1, [1]), [1]
    model.hparams.lr = 0.2
    model.hparams_initial["lr"] = 5
    model.hparams.layers.append(2)
    assert model.hparams.lr == 0.2 and model.hparams_initial == {"lr": 0.1, "layers": layers}
    assert HyperparametersMixin().hparams == HyperparametersMixin().hparams_initial == {}
    assert HyperparametersMixin()._log_hyperparams is False


def test_an_attribute_dict():
    values = AttributeDict(lr=0.1, name="a")
    values.momentum = 0.9
    del values.name
    assert (
        values == {"lr": 0.1, "momentum": 0.9}
        and repr(values) == '"lr":       0.1\n"momentum": 0.9'
    )
    assert (
        type(copy.deepcopy(values))
        is type(pickle.loads(pickle.dumps(values)))
        is AttributeDict
    )
    with pytest.raises(AttributeError, match="did you mean 'momentum'"):
        _ = values.momentun
    with pytest.raises(AttributeError, match="there are none"):
        _ = AttributeDict().lr
    assert not hasattr(values, "nothing") and repr(AttributeDict()) == ""


def made(*args, **kwargs):
    class Model(HyperparametersMixin):
        def __init__(self, learning_rate, net=None):
            self.save_hyperparameters(*args, **kwargs)

    return functools.partial(Model, 0.1)


def test_mistakes():
    with pytest.raises(UserError, match=r"'learning_rat'.*did you mean 'learning_rate'"):
        made("learning_rat")()
    with pytest.raises(UserError, match="there are learning_rate, net"):
        made("z")()
    with pytest.raises(UserError, match="not float"):
        made(0.1)()
    with pytest.raises(UserError, match="not several"):
        made({"a": 1}, {"b": 1})()
    with pytest.raises(UserError, match=r"'net' cannot be copied.*ignore=\['net'\]"):
        made()(net=(i for i in ()))
    with pytest.warns(UserWarning, match=r"'net' is a module"):
        made()(net=torch.nn.Linear(1, 1))
    assert made(ignore={"net"})(net=(i for i in ())).hparams == {"learning_rate": 0.1}


def test_outside_of_init_there_is_nothing_to_keep():
    model = HyperparametersMixin()
    model.save_hyperparameters()
    assert model.hparams == {} and model._hparams_name is None
    model.save_hyperparameters({"a": 1})
    assert model.hparams.a == 1
