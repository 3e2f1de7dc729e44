"""Epochs are counted as Lightning counts them, wherever a checkpoint was written."""

import pytest
import torch
from lightnings import package

import multigpu.trainer as ours

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
}


def fit(library, path, stop=False, ckpt_path=None, **limits) -> list[int]:
    """The numbers of the epochs that run.

    Checkpoints: `path`.hook at each epoch's end, .end in on_train_end, .after fit.
    """
    begun = []

    class Module(library.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    class Watch(library.Callback):
        def on_train_epoch_start(self, trainer, module):
            begun.append(trainer.current_epoch)

        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(f"{path}.hook")
            trainer.should_stop = stop

        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(f"{path}.end")

    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2
    )
    trainer = library.Trainer(
        callbacks=[Watch()], enable_model_summary=False, **QUIET, **limits
    )
    trainer.fit(Module(), data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(f"{path}.after")
    return begun


@pytest.mark.parametrize("when", ["hook", "end", "after"])
@pytest.mark.filterwarnings("ignore")
def test_a_run_goes_on_with_the_next_epoch(tmp_path, when):
    fit(ours, tmp_path / "a", max_epochs=2)
    assert fit(ours, tmp_path / "next", ckpt_path=tmp_path / f"a.{when}", max_epochs=4) == [
        2,
        3,
    ]


@pytest.mark.filterwarnings("ignore")
def test_min_epochs_is_the_least_that_runs(tmp_path):
    for library in (ours, package()):
        assert fit(library, tmp_path / "a", stop=True, min_epochs=3, max_epochs=8) == [0, 1, 2]
