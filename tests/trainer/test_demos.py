"""demos.boring_classes: a run with ours gives the weights of a run with Lightning's."""

import importlib

import lightnings
import pytest
import torch
from trainer_user import trainer

import multigpu.trainer as ours

pytestmark = pytest.mark.filterwarnings("ignore")


def both():
    """(the package, its demos.boring_classes), for each library."""
    lightning = lightnings.package()
    return [
        (ours, importlib.import_module("multigpu.trainer.demos.boring_classes")),
        (lightning, importlib.import_module("lightning.pytorch.demos.boring_classes")),
    ]


def trained(L, model, folder, **arguments):
    """The weights and what each stage returns, all from one seed."""
    torch.manual_seed(1)
    run = trainer(L, folder, max_epochs=1, **arguments)
    run.fit(model)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return weights, run.global_step, run.current_epoch


@pytest.mark.parametrize("name", ["BoringModel", "ManualOptimBoringModel"])
def test_the_models_train_as_lightnings(tmp_path, name):
    found = []
    for L, demos in both():
        torch.manual_seed(0)
        found.append(trained(L, getattr(demos, name)(), tmp_path))
    assert found[0] == found[1]
    assert found[0][1] == 64


def test_every_stage_runs_with_the_data_module(tmp_path):
    found = []
    for L, demos in both():
        torch.manual_seed(0)
        model, data = demos.BoringModel(), demos.BoringDataModule()
        run = trainer(L, tmp_path, max_epochs=1, num_sanity_val_steps=0)
        run.fit(model, data)
        predicted = torch.cat(run.predict(model, data)).tolist()
        found.append((run.test(model, data, verbose=False), predicted, run.global_step))
    assert found[0] == found[1]


def test_the_datasets_give_rows_of_the_size_that_was_asked_for():
    shapes = []
    for _, demos in both():
        mapped = demos.RandomDataset(3, 5)
        named = demos.RandomDictDataset(3, 5)[0]
        stream = demos.RandomIterableDatasetWithLen(3, 5)
        shapes.append(
            (len(mapped), mapped[0].shape, sorted(named), len(stream), len(list(stream)))
        )
    assert shapes[0] == shapes[1]


def test_the_demo_model_keeps_its_hyperparameters():
    found = []
    for _, demos in both():
        torch.manual_seed(0)
        model = demos.DemoModel(out_dim=4)
        found.append((dict(model.hparams), model(torch.ones(2, 32)).tolist()))
    assert found[0] == found[1]
