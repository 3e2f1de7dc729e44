"""ddp_spawn and ddp_notebook return what was trained, to a program without a file, too."""

import json
import sys

import pytest
import small_net
import torch
from commands import ROOT, run
from numbered_rows import Net, Rows, evaluated, trainer
from small_net import cpu, make_net, rows
from torch.utils.data import DataLoader

pytestmark = pytest.mark.slow
CELL = """
import json, os, sys, torch, multigpu.trainer as L
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, place):
        return torch.tensor([float(place)])

def loss_of(net, batch):  # a function of the notebook's
    return net.layer(batch).square().mean() * 1e-3

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        ranks = float(self.trainer.world_size)
        self.log("ranks", ranks, reduce_fx="max", on_step=False, on_epoch=True)
        return loss
    def predict_step(self, batch, batch_idx):
        return batch.flatten() + 100 * self.trainer.world_size
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

L.seed_everything(4, verbose=False)
net = Net()
saver = L.callbacks.ModelCheckpoint(os.getcwd(), monitor="loss")
trainer = L.Trainer(
    accelerator="cpu", strategy=sys.argv[1], devices=2, max_epochs=2, callbacks=[saver],
    logger=False, enable_progress_bar=False,
)
trainer.fit(net, DataLoader(Rows(), 2))
kept = torch.load(trainer.checkpoint_callback.best_model_path)["state_dict"]
print("metrics", json.dumps({
    "weights": [w.flatten().tolist() for w in net.parameters()],
    "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    "at": [trainer.current_epoch, trainer.global_step],
    "best": float(saver.best_model_score),
    "kept": all(torch.equal(kept[name], w) for name, w in net.state_dict().items()),
    "predicted": [rows.tolist() for rows in trainer.predict(net, DataLoader(Rows(), 3))],
}))
"""


@pytest.fixture(scope="module")
def cell(tmp_path_factory):
    done = run(
        sys.executable,
        "-c",
        CELL,
        "ddp_notebook",
        cwd=tmp_path_factory.mktemp("cell"),
        PYTHONPATH=ROOT,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("metrics ")]
    assert done.returncode == 0 and len(lines) == 1, done.stdout
    return json.loads(lines[0].removeprefix("metrics "))


def test_a_notebooks_functions_and_classes_train_in_other_processes(cell):
    assert cell["metrics"]["ranks"] == 2


def test_the_weights_come_back_and_are_those_of_one_process_with_the_whole_batch(cell):
    torch.manual_seed(4)
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(2):
        for batch in DataLoader(Rows(16), 4):
            optimizer.zero_grad()
            (layer(batch).square().mean() * 1e-3).backward()
            optimizer.step()
    assert cell["weights"] == [
        pytest.approx(w.flatten().tolist(), abs=1e-6) for w in layer.parameters()
    ]


def test_metrics_counters_and_the_best_checkpoint_come_back(cell):
    assert (
        cell["at"] == [2, 8]
        and cell["kept"]
        and cell["best"] == pytest.approx(cell["metrics"]["loss"])
    )


def test_predictions_of_spawned_ranks_come_in_order(cell):
    assert cell["predicted"] == [
        [200.0 + row for row in range(at, min(at + 3, 16))] for at in range(0, 16, 3)
    ]


def test_ddp_without_a_script_names_the_strategy_that_works(tmp_path):
    done = run(sys.executable, "-c", CELL, "ddp", cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.returncode != 0 and "Traceback" not in done.stdout
    (message,) = (line for line in done.stdout.splitlines() if "strategy='ddp'" in line)
    assert "not in a script" in message and "strategy='ddp_notebook'" in message


def test_ddp_spawn_evaluates_as_one_process(tmp_path):
    """Each call is a pair of processes of its own; a run's rows stay there, and its metrics
    come back.
    """
    two, one = trainer(tmp_path, strategy="ddp_spawn", devices=2), evaluated(tmp_path)
    assert two.validate(Net(), DataLoader(Rows(10), 3), verbose=False) == one["metrics"]


def test_a_rank_that_fails_in_a_spawned_run_is_told_by_its_traceback(tmp_path):
    def fail(net, batch, batch_idx):
        if net.global_rank == 1:
            raise ZeroDivisionError("planted in rank 1")

    with pytest.raises(RuntimeError, match="ZeroDivisionError: planted in rank 1"):
        trainer(tmp_path, strategy="ddp_spawn", devices=2).fit(
            Net(train=fail), DataLoader(Rows(8), 2)
        )


def test_a_script_that_trains_while_it_is_imported_is_refused(tmp_path):
    path = tmp_path / "unguarded.py"
    path.write_text(CELL)
    done = run(sys.executable, path, "ddp_spawn", cwd=tmp_path, PYTHONPATH=ROOT)
    assert (
        done.returncode != 0
        and "put the code that trains under `if __name__ == '__main__':`" in done.stdout
    )
    assert "Traceback" not in done.stdout and done.stdout.splitlines()[-1].endswith(
        "Look for its message above."
    )


def test_spawned_ranks_may_be_saved_after_an_evaluation(tmp_path):
    trainer, model = cpu(strategy="ddp_spawn", devices=1), make_net()
    trainer.fit(model, DataLoader(rows(4), 2))
    trainer.validate(model, DataLoader(rows(4), 2), verbose=False)
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    saved = torch.load(tmp_path / "mine.ckpt")
    assert saved["global_step"] == 2 and len(saved["optimizer_states"]) == 1


class MadeLate(small_net.Net):
    """Its layer exists only after configure_model."""

    def __init__(self):
        super().__init__()
        self.layer = None

    def configure_model(self):
        self.layer = self.layer or torch.nn.Sequential(torch.nn.Linear(4, 3))


def test_layers_that_the_spawned_ranks_make_come_back():
    model = MadeLate()
    cpu(strategy="ddp_spawn", devices=1).fit(model, DataLoader(rows(4), 2))
    alone = MadeLate()
    torch.manual_seed(0)
    alone.configure_model()
    assert model.layer[0].weight.shape == alone.layer[0].weight.shape
    assert not torch.equal(model.layer[0].weight, alone.layer[0].weight)
