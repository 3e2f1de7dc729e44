"""`multigpu prove --self`: what one run says by itself.

`make test` has one program for each answer, `make test-prove` all.
"""

import os

import pytest
from wrong_cases import FAULTS

ANSWERS = {
    "amp": None,
    "seeds_without_broadcast": "weights_apart",
    "first_micro_batch_synchronized": "not_averaged",
    "sum_not_divided": "not_the_mean",
    "first_rows_on_each_rank": "same_rows",
    "loss_divided_by_ranks": None,  # equal on all ranks: it takes a reference to see it
}
CHOSEN = list(ANSWERS) if os.environ.get("ALL_PROOFS") else list(ANSWERS)[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_one_run_alone(proved, name):
    source = next(fault for fault in FAULTS if fault.name == name).source()
    proof = proved(source, self_check=True, steps=5)
    kind = ANSWERS[name]
    assert (proof.cause and proof.cause.kind) == kind, str(proof)
    assert proof.exit_code == (1 if kind else 0)
    if not kind:
        assert "equal weights, the gradient is the mean of theirs" in proof.line
