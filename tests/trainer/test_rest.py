"""The Trainer's other arguments: lengths, limits, modes, profiler; and the loops' parts."""

import time
import warnings

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler
from trainer_ranks import Backwards, Net, Rows, Stream, changed, refusal, trainer

from multigpu.strategies import STRATEGIES, strategy_by_name
from multigpu.trainer.loops import dataloaders
from multigpu.trainer.loops.results import Results

pytestmark = pytest.mark.filterwarnings("ignore")


def ran(tmp_path, net=None, rows=10, val=10, **arguments):
    """(trained batches, validated batches, epochs, steps) of a fit in batches of 2."""
    seen = []
    net = net or changed(on_validation_batch_end=lambda self, *_: seen.append(1))
    run = trainer(tmp_path, **arguments)
    run.fit(net, DataLoader(Rows(rows), 2), DataLoader(Rows(val), 2) if val else None)
    return len(net.rows) - len(seen), len(seen), run.current_epoch, run.global_step


LENGTHS = {
    "two epochs": ({"max_epochs": 2}, (10, 10, 2, 10)),
    "max_steps": ({"max_steps": 7, "max_epochs": -1}, (7, 5, 2, 7)),
    "max_steps, accumulated": (
        {"max_steps": 3, "max_epochs": -1, "accumulate_grad_batches": 2},
        (5, 5, 1, 3),
    ),
    "max_epochs before max_steps": ({"max_steps": 99, "max_epochs": 1}, (5, 5, 1, 5)),
    "none": ({"max_epochs": 0}, (0, 0, 0, 0)),
    "no steps": ({"max_steps": 0}, (0, 0, 0, 0)),
    "fast_dev_run": ({"fast_dev_run": True, "max_epochs": 9}, (1, 1, 1, 1)),
    "fast_dev_run of 3": ({"fast_dev_run": 3}, (3, 3, 1, 3)),
    "limits": ({"limit_train_batches": 3, "limit_val_batches": 2}, (3, 2, 1, 3)),
    "shares": ({"limit_train_batches": 0.5, "limit_val_batches": 0.2}, (2, 1, 1, 2)),
    "all": ({"limit_train_batches": 1.0, "limit_val_batches": 99}, (5, 5, 1, 5)),
    "nothing to validate": ({"limit_val_batches": 0}, (5, 0, 1, 5)),
    "nothing to train": ({"limit_train_batches": 0}, (0, 0, 0, 0)),
    "sanity": ({"num_sanity_val_steps": 2}, (5, 7, 1, 5)),
    "every other epoch": ({"max_epochs": 3, "check_val_every_n_epoch": 2}, (15, 5, 3, 15)),
    "overfit": ({"overfit_batches": 2, "max_epochs": 2}, (4, 4, 2, 4)),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_how_much_is_run(tmp_path, case):
    arguments, expected = LENGTHS[case]
    assert ran(tmp_path, **arguments) == expected


def stop(net, batch, batch_idx):
    net.trainer.should_stop = True


@pytest.mark.parametrize(
    ("least", "steps"),
    [({}, 1), ({"min_epochs": 2}, 10), ({"min_steps": 3}, 3), ({"min_epochs": 1}, 5)],
)
def test_should_stop_waits_for_the_least_that_was_asked_for(tmp_path, least, steps):
    assert ran(tmp_path, Net(train=stop), val=0, max_epochs=5, **least)[3] == steps


def test_max_time_ends_the_run(tmp_path):
    net = Net(train=lambda *_: time.sleep(0.02))
    assert 1 <= ran(tmp_path, net, rows=1000, val=0, max_time={"seconds": 1})[3] < 500


def test_overfit_batches_takes_the_same_rows_each_time(tmp_path):
    net = Net()
    trainer(tmp_path, overfit_batches=2, max_epochs=2).fit(
        net, DataLoader(Rows(10), 2, shuffle=True)
    )
    assert net.rows == [[0, 1], [2, 3]] * 2


def test_estimated_stepping_batches(tmp_path):
    reported = []

    def configure_optimizers(self):
        reported.append(self.trainer.estimated_stepping_batches)
        return torch.optim.SGD(self.parameters(), 0.1)

    for arguments in (
        {"max_epochs": 3, "accumulate_grad_batches": 2},
        {"max_steps": 4, "max_epochs": 9},
        {"max_epochs": -1, "max_steps": 7},
    ):
        run = trainer(tmp_path, limit_val_batches=0, **arguments)
        run.fit(changed(configure_optimizers=configure_optimizers), DataLoader(Rows(10), 2))
        assert run.estimated_stepping_batches == reported[-1]
    assert reported == [9, 4, 7]


def test_a_stream_of_unknown_length_is_trained_to_its_end(tmp_path):
    net = Net()
    run = trainer(tmp_path, max_epochs=2, accumulate_grad_batches=2)
    run.fit(net, DataLoader(Stream(5), 2), DataLoader(Stream(3), 2))
    assert run.global_step == 4 and net.rows == [[0, 1], [2, 3], [4], [0, 1], [2]] * 2


def test_deterministic_and_benchmark_are_set_in_torch(tmp_path):
    before = torch.backends.cudnn.benchmark
    try:
        ran(tmp_path, deterministic=True, benchmark=True, fast_dev_run=True)
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark
        ran(tmp_path, deterministic="warn", benchmark=False, fast_dev_run=True)
        assert (
            torch.is_deterministic_algorithms_warn_only_enabled()
            and not torch.backends.cudnn.benchmark
        )
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize("inference", [True, False])
def test_evaluation_keeps_no_graph_and_inference_mode_only_where_wanted(tmp_path, inference):
    reported = []
    net = Net(
        val=lambda net, *_: reported.append(
            (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), net.training)
        )
    )
    trainer(tmp_path, inference_mode=inference).validate(
        net.train(), DataLoader(Rows(2)), verbose=False
    )
    assert reported == [(inference, False, False)] * 2 and net.training


def test_evaluation_leaves_a_frozen_parts_mode_alone(tmp_path):
    net = Net()
    net.layer.eval()
    with pytest.warns(
        UserWarning, match=r"1 module in eval mode at the start of training, and left so"
    ):
        ran(tmp_path, net)
    assert net.training and not net.layer.training


def test_the_simple_profiler_prints_a_table(tmp_path, capsys):
    net = changed(on_train_batch_end=lambda self, *_: None)
    trainer(tmp_path, profiler="simple").fit(net, DataLoader(Rows(10), 2))
    reported = capsys.readouterr().out
    assert "on_train_batch_end" in reported and "training_step" in reported


def test_what_is_logged_in_validation_is_verbose_or_not(tmp_path, capsys):
    trainer(tmp_path).validate(Net(), DataLoader(Rows(10), 3))
    assert "mean 4.5000" in capsys.readouterr().out


def test_a_tensor_is_scaled_back_before_it_is_clipped(tmp_path):
    """16-mixed on the CPU is bf16-mixed, with a warning that says so."""
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        run = trainer(tmp_path, precision=16)
        run.fit(Net(), DataLoader(Rows(4), 2))
    assert run.precision_plugin.name == "bf16-mixed" and any(
        "bf16-mixed is used instead" in str(w.message) for w in reported
    )


def test_64_bit_is_64_bit_throughout(tmp_path):
    kinds = []
    net = Net(
        train=lambda net, batch, i: kinds.extend(
            (batch.dtype, torch.zeros(1).dtype, net.dtype)
        )
    )
    ran(tmp_path, net, precision=64, fast_dev_run=True, val=0)
    assert set(kinds) == {torch.float64} and torch.get_default_dtype() == torch.float32


# ---- names ----------------------------------------------------------------------------------


def test_every_name_makes_its_strategy():
    for name in STRATEGIES:
        assert strategy_by_name(name).name == name
    for stem in ("ddp", "ddp_spawn", "ddp_notebook"):
        for answer in (True, False):
            made = strategy_by_name(f"{stem}_find_unused_parameters_{str(answer).lower()}")
            assert made.name == stem and made.keywords == {"find_unused_parameters": answer}
    assert "there is no strategy" in refusal(
        lambda: strategy_by_name("ddp_find_unused_parameters_maybe")
    )
    own = strategy_by_name("ddp")
    assert strategy_by_name(own) is own


# ---- who gets which batch -------------------------------------------------------------------


def rows(loader, epoch=0):
    dataloaders.start_epoch(loader, epoch)
    return [batch.flatten().int().tolist() for batch in loader]


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_in_evaluation_the_shares_are_the_whole_each_batch_once(parts):
    loader = DataLoader(Rows(10), 3)
    shares = [
        dataloaders.shard_loader(loader, (parts, mine), training=False)
        for mine in range(parts)
    ]
    whole = rows(loader)
    assert [len(share) for share in shares] == [len(rows(share)) for share in shares]
    for mine, share in enumerate(shares):
        assert rows(share) == whole[mine::parts]


@pytest.mark.parametrize(
    ("sampler", "shuffle"), [(None, False), (None, True), (Backwards(10), None)]
)
def test_in_training_all_ranks_make_the_same_number_of_steps(sampler, shuffle):
    loader = DataLoader(Rows(10), 2, shuffle=shuffle, sampler=sampler)
    sharded = [dataloaders.shard_loader(loader, (3, mine), training=True) for mine in range(3)]
    for epoch in (0, 1):
        found = [rows(loader, epoch) for loader in sharded]
        assert (
            [len(share) for share in found] == [2, 2, 2] == [len(loader) for loader in sharded]
        )
        assert {row for share in found for batch in share for row in batch} == set(range(10))
    assert (rows(sharded[0], 0) != rows(sharded[0], 1)) == bool(shuffle)


def test_a_loader_that_is_shared_already_is_left_alone():
    own = DataLoader(Rows(10), 2, sampler=DistributedSampler(Rows(10), 2, 1, shuffle=False))
    for loader in (own, DataLoader(Stream(4)), [1, 2]):
        assert dataloaders.shard_loader(loader, (2, 0), training=True) is loader
    sharded = dataloaders.shard_loader(
        DataLoader(Rows(10), 3, drop_last=True), (2, 0), training=True
    )
    assert rows(sharded) == [[0, 2, 4]], "drop_last is kept"


def test_a_sampler_that_gives_whole_batches_is_dealt_out():
    """batch_size=None: torch's way to let a data set make a batch of a list of rows."""
    loader = DataLoader(
        Rows(10), None, sampler=BatchSampler(SequentialSampler(range(10)), 2, False)
    )
    for training in (True, False):
        sharded = dataloaders.shard_loader(loader, (2, 0), training)
        assert list(sharded.sampler) == [[0, 1], [4, 5], [8, 9]] and len(sharded) == 3


# ---- the logged numbers ---------------------------------------------------------------------


def results(ranks=1, gather=None, training=True):
    return Results(gather or (lambda thing: [thing]), ranks, training)


def log(where, name, value, **changes):
    settings = {
        "prog_bar": False,
        "logger": None,
        "on_step": None,
        "on_epoch": None,
        "reduce_fx": "mean",
        "sync_dist": False,
        "add_dataloader_idx": True,
        "batch_size": None,
        "rank_zero_only": False,
    }
    hook = "training_step" if where.training else "validation_step"
    where.log(hook, None, name, value, **(settings | changes))


def test_a_mean_is_weighted_by_the_rows():
    kept = results(training=False)
    for batch, value in (
        (torch.ones(3, 2), 1.0),
        ({"x": [torch.ones(1)]}, 5.0),
        (torch.ones(()), 9.0),
    ):
        kept.start_batch(batch)
        log(kept, "a", value)
        log(kept, "b", value, batch_size=1)
        for how in ("sum", "max", "min"):
            log(kept, how, value, reduce_fx=how)
    assert {k: float(v) for k, v in kept.epoch_metrics().logger.items()} == pytest.approx(
        {"a": (3 + 5 + 9) / 5, "b": 5, "sum": 15, "max": 9, "min": 1}
    )
    kept.reset()
    assert kept.epoch_metrics().logger == {}


def test_names_of_a_step_and_an_epoch():
    kept = results()
    kept.start_batch(torch.ones(2))
    log(kept, "both", 1.0, on_epoch=True, prog_bar=True)
    log(kept, "step", 2.0)
    log(kept, "hidden", 3.0, logger=False, on_epoch=True)
    reported = kept.step_metrics(exchange=False)
    assert set(reported.logger) == {"both_step", "step"}
    assert set(reported.progress_bar) == {"both_step"}
    assert set(reported.callback) == {"both", "both_step", "step", "hidden", "hidden_step"}
    assert set(kept.epoch_metrics().logger) == {"both_epoch"}
    kept.start_batch(torch.ones(2))
    assert kept.step_metrics(exchange=False).logger == {}, "nothing was logged in this batch"


def test_ranks_are_put_together_by_the_rows_of_each():
    other = results(2)
    other.start_batch(torch.ones(1))
    log(other, "a", 7.0, on_epoch=True, sync_dist=True)
    log(other, "top", 1.0, on_epoch=True, on_step=False, reduce_fx="max")
    sent = []
    other.gather = lambda thing: sent.append(thing) or [thing]
    other.epoch_metrics(), other.step_metrics(exchange=True)
    kept = results(2, lambda thing: [thing, sent.pop(0)])
    kept.start_batch(torch.ones(3))
    log(kept, "a", 1.0, on_epoch=True, sync_dist=True)
    log(kept, "top", 4.0, on_epoch=True, on_step=False, reduce_fx="max")
    epoch = kept.epoch_metrics().logger
    assert (float(epoch["a_epoch"]), float(epoch["top"])) == ((3 * 1 + 7) / 4, 4)
    assert float(kept.step_metrics(exchange=True).logger["a_step"]) == 4.0


def test_a_metric_object_is_asked_once_and_reset():
    class Metric:
        def __init__(self):
            self.resets, self._forward_cache = 0, 3.0

        def compute(self):
            return torch.tensor(8.0)

        def reset(self):
            self.resets += 1

    metric, kept = Metric(), results()
    kept.start_batch(torch.ones(2))
    log(kept, "m", metric, on_epoch=True)
    assert (
        float(kept.step_metrics(False).logger["m_step"]) == 3
        and float(kept.epoch_metrics().logger["m_epoch"]) == 8
    )
    kept.reset()
    assert metric.resets == 1
