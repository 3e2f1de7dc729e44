"""Wrong programs fail with their cause, right ones hold: faults.txt has all of them.

`make test` plants one fault of each mechanism; with ALL_PROOFS=1, `make test-prove`, all.
"""

import os
from collections.abc import Callable

import pytest
import wrong_cases

# One fault for each way in which a cause is found. A factor, a wrong micro-batch and what
# Adam makes of rounding are in test_command.py, test_page.py and test_limits.py.
ALWAYS = (
    "set_epoch_forgotten",
    "initialized_after_ddp",
    "uneven_last_batch",
    "own_rows_standardized",
    "clipped_in_no_sync",
    "rank_0_steps_the_scheduler",
    "rank_0_resumes",
    "rank_stops_early",
)
ALL = bool(os.environ.get("ALL_PROOFS"))
CHOSEN = [fault for fault in wrong_cases.FAULTS if ALL or fault.name in ALWAYS]


@pytest.mark.slow
@pytest.mark.parametrize("fault", CHOSEN, ids=[fault.name for fault in CHOSEN])
def test_a_fault_is_named(proved: Callable, fault: wrong_cases.Fault) -> None:
    hangs = fault.kind == "hang"
    proof = proved(fault.source(), ranks=fault.ranks, timeout=15 if hangs else 60)
    found = (proof.exit_code, proof.cause.kind if proof.cause else "holds")
    assert found == (fault.exit, fault.kind), str(proof)
    for name in ("rank", "parameter", "step"):
        wanted = getattr(fault, name)
        if wanted is not None:
            assert getattr(proof.cause, name) == wanted, str(proof)


def test_all_mechanisms_are_chosen() -> None:
    names = {fault.name for fault in wrong_cases.FAULTS}
    assert set(ALWAYS) <= names
    assert len({fault.kind for fault in wrong_cases.FAULTS}) >= 24
