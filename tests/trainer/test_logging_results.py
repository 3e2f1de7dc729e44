"""Results, the object behind self.log: sums that are no number."""

from multigpu.trainer.log import LogContext
from multigpu.trainer.results import LogArguments, Results

STEP = LogContext(None, "training_step")


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
