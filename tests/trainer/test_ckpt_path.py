"""ckpt_path="last", and trainer.ckpt_path."""

import lightnings
import pytest
from trainer_user import trainer
from user_methods import user

import multigpu.trainer as ours

pytestmark = pytest.mark.filterwarnings("ignore")


def saver(L, **arguments):
    return L.pytorch.callbacks.ModelCheckpoint(**arguments)


def checkpointing(L, folder, **arguments):
    return trainer(L, folder, enable_checkpointing=True, **arguments)


@pytest.mark.parametrize("L", [ours, "lightning"], ids=["ours", "lightning"])
def test_last_is_an_earlier_runs_checkpoint(tmp_path, L):
    L = lightnings.package() if L == "lightning" else L
    first = checkpointing(L, tmp_path, max_epochs=1, callbacks=saver(L, save_last=True))
    with pytest.warns(UserWarning, match=r"(?i)no checkpoint|none is loaded"):
        first.fit(user(L)(), ckpt_path="last")
    assert first.ckpt_path is None and first.global_step == 3
    again = checkpointing(L, tmp_path, max_epochs=3, callbacks=saver(L))
    again.fit(user(L)(), ckpt_path="last")
    assert again.ckpt_path == str(tmp_path / "checkpoints" / "last.ckpt")
    assert again.global_step == 9


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_ckpt_path_is_what_the_last_run_loaded(tmp_path, stage):
    paths = []
    for L in (ours, lightnings.package()):
        folder = tmp_path / L.__name__
        run = checkpointing(L, folder, max_epochs=1)
        module = user(L)()
        run.fit(module)
        seen = [run.ckpt_path]
        call = getattr(run, stage)
        call(module)
        seen.append(run.ckpt_path)
        with pytest.warns(UserWarning, match="best|without a model"):
            call()
        seen.append(run.ckpt_path == run.checkpoint_callback.best_model_path)
        call(module, ckpt_path="best")
        seen.append(run.ckpt_path == run.checkpoint_callback.best_model_path)
        paths.append(seen)
    assert paths[0] == paths[1] == [None, None, True, True]
