"""In which hooks self.log collects, and what a hook sees of it."""

import pytest
import torch
from regression_net import Net, batches, trained

from multigpu.errors import UserError

SILENT = ["configure_optimizers", "on_fit_start", "on_validation_end", "predict_step"]
NAMELESS = ["on_after_batch_transfer"]


def run_all(model: Net, folder: object) -> None:
    trainer = trained(
        model, batches(), batches(), enable_checkpointing=True, default_root_dir=folder
    )
    trainer.predict(model, batches())


def logging_in(hook: str) -> Net:
    """A module that logs in this hook, and goes on as it would without."""

    class Silent(Net):
        def predict_step(self, batch, batch_idx):
            return None

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def logs(self, *args, **keywords):
        self.log("here", 1.0)
        return getattr(Silent, hook)(self, *args, **keywords)

    return type("Logs", (Silent,), {hook: logs})()


@pytest.mark.parametrize("hook", SILENT + NAMELESS)
def test_where_nothing_collects_log_says_so(hook, tmp_path):
    where = f"in {hook}" if hook in SILENT else "outside of the steps and their hooks"
    with pytest.raises(UserError, match=rf"self.log\('here'\) {where}: "):
        run_all(logging_in(hook), tmp_path)


COLLECTING = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
]


@pytest.mark.parametrize("hook", COLLECTING)
def test_where_something_collects(hook):
    assert trained(logging_in(hook), batches(), batches()).callback_metrics["here"] == 1.0
