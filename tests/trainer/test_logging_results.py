"""Results, the object behind self.log: names, means and other reductions, without a run."""

import pytest
import torch

from multigpu.trainer.results import Results


def results(ranks=1, gather=None, training=True):
    return Results(gather or (lambda thing: [thing]), ranks, training)


def log(where, name, value, **changes):
    hook = "training_step" if where.training else "validation_step"
    where.log(hook, None, name, value, **changes)


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


# ---- of two ranks ---------------------------------------------------------------------------


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


def test_infinities_of_two_ranks_make_no_number():
    """One rank's loss may have overflowed above, the other's below: a mean of that is nan, and
    no error.
    """

    def gather(mine):
        (key,) = mine
        settings, total, *weight = mine[key]
        return [mine, {key: (settings, -total, *weight)}]

    results = Results(gather, ranks=2, training=True)
    settings = {"on_step": True, "on_epoch": True, "sync_dist": True, "batch_size": 1}
    log(results, "loss", float("inf"), **settings)
    assert results.step_metrics(exchange=True).logger["loss_step"].isnan()
    assert results.epoch_metrics().logger["loss_epoch"].isnan()
