"""Results, the object behind self.log: a metric object, and sums that are no number."""

import torch

from multigpu.trainer.log import LogContext
from multigpu.trainer.results import LogArguments, Results

STEP = LogContext(None, "training_step")


class Metric:
    """A metric as torchmetrics has it: a value of this batch, and one of all batches."""

    resets, _forward_cache = 0, 3.0

    def compute(self):
        return torch.tensor(8.0)

    def reset(self):
        self.resets += 1


def test_a_metric_object_is_asked_once_and_reset():
    metric = Metric()
    results = Results(lambda thing: [thing], ranks=1, training=True)
    results.start_batch(torch.ones(2))
    results.log(STEP, "m", metric, LogArguments(on_epoch=True))
    assert float(results.step_metrics(exchange=False).logged["m_step"]) == 3
    assert float(results.epoch_metrics().logged["m_epoch"]) == 8
    results.reset()
    assert metric.resets == 1


def test_infinities_of_two_ranks_make_no_number():
    """One rank's loss may have overflowed above, the other's below: a mean of that is nan, and
    no error.
    """

    def gather(mine):
        (key,) = mine
        rule, total, *weight = mine[key]
        return [mine, {key: (rule, -total, *weight)}]

    results = Results(gather, ranks=2, training=True)
    arguments = LogArguments(on_step=True, on_epoch=True, sync_dist=True)
    results.log(STEP, "loss", float("inf"), arguments, batch_size=1)
    assert results.step_metrics(exchange=True).logged["loss_step"].isnan()
    assert results.epoch_metrics().logged["loss_epoch"].isnan()
