"""A resumed run begins with the next epoch, wherever the checkpoint was written."""

import pytest
import small_net

import multigpu.trainer as L


class Saves(L.Callback):
    """Checkpoints: `path`.hook at each epoch's end, .end in on_train_end."""

    def __init__(self, path):
        self.path = path
        self.begun = []

    def on_train_epoch_start(self, trainer, module):
        self.begun.append(trainer.current_epoch)

    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(f"{self.path}.hook")

    def on_train_end(self, trainer, module):
        trainer.save_checkpoint(f"{self.path}.end")


@pytest.mark.parametrize("when", ["hook", "end", "after"])
def test_a_run_goes_on_with_the_next_epoch(tmp_path, when):
    path = tmp_path / "a"
    first = small_net.fitted(small_net.make_net(), callbacks=[Saves(path)], max_epochs=2)
    first.save_checkpoint(f"{path}.after")
    again = Saves(tmp_path / "b")
    trainer = small_net.cpu(callbacks=[again], max_epochs=4)
    trainer.fit(small_net.make_net(), *small_net.loaders(), ckpt_path=f"{path}.{when}")
    assert again.begun == [2, 3]
