"""Warnings about settings that work, but probably not as the user wants."""

import warnings

import plain_net
import pytest
import torch
from numbered_rows import Backwards, Net, Rows, Stream, changed, trainer
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset

import multigpu.trainer as L
from multigpu import devices


def warned(function):
    """The texts of the warnings that `function` gives."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in recorded]


def says(function, *facts):
    """Whether one warning of `function` names all these facts."""
    return any(all(fact in text for fact in facts) for text in warned(function))


# ---- data -----------------------------------------------------------------------------------


# case → (a dataloader, whether more workers may help)
WORKERS = {
    "a data set of the user's": (DataLoader(Rows(4)), True),
    "one worker": (DataLoader(Rows(4), num_workers=1), True),
    "two workers": (DataLoader(Rows(4), num_workers=2), False),
    "in memory": (DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 1))), False),
    "a part, in memory": (DataLoader(Subset([torch.ones(1)] * 4, [0, 2])), False),
    "a stream": (DataLoader(Stream(4)), False),
}


@pytest.mark.parametrize("case", WORKERS)
def test_workers_are_advised_where_one_process_reads(tmp_path, monkeypatch, case):
    monkeypatch.setattr(devices, "available_cores", lambda: 8)
    loader, advised = WORKERS[case]
    net = changed(
        training_step=lambda self, *_: self.layer.weight.sum(),
        validation_step=lambda self, *_: None,
    )
    texts = warned(
        lambda: trainer(tmp_path, limit_train_batches=1, limit_val_batches=1).fit(
            net, loader, loader
        )
    )
    for kind in ("train", "val"):
        about = [text for text in texts if f"'{kind}_dataloader'" in text]
        assert len(about) == advised
        assert all("num_workers=7" in text for text in about)


def test_no_workers_are_advised_without_free_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "available_cores", lambda: 2)
    assert not says(lambda: trainer(tmp_path).fit(Net(), DataLoader(Rows(4))), "workers")


@pytest.mark.parametrize("sampler", [RandomSampler, lambda rows: Backwards(len(rows))])
def test_overfit_batches_reads_in_order_and_says_so(tmp_path, sampler):
    rows = Rows(8)
    net = Net()
    run = trainer(tmp_path, overfit_batches=2, max_epochs=2)
    loader = DataLoader(rows, 2, sampler=sampler(rows))
    assert says(lambda: run.fit(net, loader, loader), "overfit", "train", "shuffling")
    assert net.rows == [[0, 1], [2, 3]] * 4
    assert isinstance(run.val_dataloaders.sampler, SequentialSampler)


# ---- logging --------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "expected"), [(3, True), (2, False), (None, False)])
def test_a_logging_interval_above_the_batches(tmp_path, every, expected):
    run = trainer(tmp_path, logger=L.loggers.CSVLogger(tmp_path), log_every_n_steps=every)
    given = says(
        lambda: run.fit(Net(), DataLoader(Rows(4), 2)), "(2)", f"log_every_n_steps={every}"
    )
    assert given == expected


def logs(**keywords):
    return changed(
        on_train_epoch_end=lambda self: self.log("a", 1.0, **keywords),
        on_validation_epoch_end=lambda self: self.log("b", 1.0, **keywords),
    )


def test_logger_true_without_a_logger(tmp_path):
    def fit(net):
        trainer(tmp_path).fit(net, DataLoader(Rows(2)), DataLoader(Rows(2)))

    texts = warned(lambda: fit(logs(logger=True)))
    for name in ("'a'", "'b'"):
        assert any(name in text and "no logger" in text for text in texts)
    assert not says(lambda: fit(logs()), "no logger")


def test_log_without_a_trainer_says_that_the_value_is_lost():
    net = L.LightningModule()
    assert says(lambda: net.log("a", 1.0), "'a'", "LightningModule", "lost")
    net.trainer = trainer(".")
    assert says(lambda: net.log("a", 1.0), "'a'", "LightningModule", "lost")


@pytest.mark.parametrize(("kind", "expected"), [("ASGD", True), ("Adam", False)])
def test_a_momentum_that_an_optimizer_has_not(tmp_path, kind, expected):
    def configure_optimizers(self):
        return getattr(torch.optim, kind)(self.parameters(), 0.1)

    monitor = L.callbacks.LearningRateMonitor(log_momentum=True)
    run = trainer(tmp_path, logger=L.loggers.CSVLogger(tmp_path), callbacks=[monitor])
    net = changed(configure_optimizers=configure_optimizers)
    assert says(lambda: run.fit(net, DataLoader(Rows(2))), "momentum") == expected


# ---- optimization ---------------------------------------------------------------------------


def plateau(self, **keys):
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return [optimizer], [{"scheduler": scheduler, "monitor": "giraffe", **keys}]


def test_a_metric_that_a_scheduler_waits_for(tmp_path):
    net = changed(configure_optimizers=lambda self: plateau(self, strict=False))
    run = trainer(tmp_path)
    assert says(lambda: run.fit(net, DataLoader(Rows(2))), "'giraffe'", "not logged", "strict")


def test_keys_that_only_automatic_optimization_reads(tmp_path):
    net = changed(configure_optimizers=plateau)
    net.automatic_optimization = False
    run = trainer(tmp_path)
    assert says(lambda: run.fit(net, DataLoader(Rows(2))), "'monitor'", "ignored", "step()")


# ---- lengths and files ----------------------------------------------------------------------


def test_a_fit_without_a_limit_says_how_long_it_is(tmp_path):
    class Stops(L.Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.should_stop = True

    run = plain_net.trainer(tmp_path, max_epochs=None, callbacks=[Stops()])
    assert run.max_epochs is None
    assert says(
        lambda: run.fit(plain_net.Net(), DataLoader(plain_net.rows())), "max_epochs", "1000"
    )
    assert run.max_epochs == 1000


def test_weights_without_parameters(tmp_path):
    run = plain_net.trainer(tmp_path)
    run.fit(plain_net.Net(), DataLoader(plain_net.rows()))
    run.save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt")
    torch.save({**content, "state_dict": {}}, tmp_path / "b.ckpt")
    load = plain_net.Net.load_from_checkpoint
    for name, expected in (("a.ckpt", False), ("b.ckpt", True)):
        path = tmp_path / name
        assert says(lambda path=path: load(path, strict=False), "no parameters") == expected
