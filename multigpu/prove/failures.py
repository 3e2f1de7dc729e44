"""What is said of a run that failed, hung, or made no step."""

from dataclasses import dataclass
from pathlib import Path

from multigpu.errors import CONNECTION_LOST, needs_torchrun, pluralize
from multigpu.prove import plan
from multigpu.prove.causes import Cause
from multigpu.prove.compare import Comparison
from multigpu.prove.plan import Plan
from multigpu.prove.processes import Run, quoted
from multigpu.prove.record import ENDED_PREFIX, FAILED_PREFIX, RankRecord

# What a program that computes on GPUs ends with if there is none.
NO_GPU = ("_cuda_setDevice", "not compiled with CUDA enabled", "Found no NVIDIA driver")


class Unknown(Exception):
    """Nothing can be said: the cause, and the end of a run's output."""

    def __init__(self, kind: str, sentence: str, remedy: str, tail: str = "", **more: object):
        super().__init__(sentence)
        step = more.pop("step", 1)
        self.cause = Cause(kind, sentence, remedy, step, unknown=True, **more)
        self.tail = tail


def no_step(run: Run, label: str, planned: Plan, timeout: float) -> Unknown:
    if run.code != 0:
        return ended_badly(run, label, planned, timeout)
    return Unknown(
        "no_optimizer",
        f"{label} made no step of a torch.optim optimizer",
        "prove a program that calls step() of a torch.optim optimizer, and passes its "
        "environment on to the processes that it starts",
        _tail(run),
    )


def ended_badly(run: Run, label: str, planned: Plan, timeout: float) -> Unknown:
    """The sentence about a run that failed or hung, and the end of its output."""
    records = run.records()
    step = 1 + min(
        (sum(step.optimizer == 0 for step in record.steps) for record in records),
        default=0,
    )
    if run.code is None:
        places = [
            f"rank {answer['rank']} waits at "
            f"{Path(answer['file']).name}:{answer['number']} ({answer['line']})"
            for answer in run.waits
        ]
        where = "; ".join(places) or "no process says where"
        return Unknown(
            "hang",
            f"{label} hangs in step {step}: it made no step for {timeout:g} s, and "
            f"was ended: {where}",
            "let all ranks call the same collectives in the same order; if the program "
            "was only slow, give a longer --timeout",
            step=step,
        )
    how = f"exit code {run.code}" if run.code > 0 else f"signal {-run.code}"
    failure = _first_failure(run, records)
    return Unknown(
        "crash",
        f"{label} failed in step {step}" + (failure.text if failure else f" with {how}"),
        _first_to_mend(label, failure, planned),
        (failure and failure.trace) or _tail(run),
        step=step,
        rank=failure.rank if failure else None,
    )


def rank_that_ended(parallel: Run, comparison: Comparison) -> Cause | None:
    """Why the parallel run failed: a rank that reached its end before the others did.

    None if it failed otherwise.
    """
    ended = parallel.notes(ENDED_PREFIX)
    wanted = sum(step.optimizer == 0 for step in comparison.reference[0].steps)
    if len(ended) in (0, len(comparison.parallel)) or ended[0]["steps"] >= wanted:
        return None
    rank, steps = ended[0]["rank"], ended[0]["steps"]
    return Cause(
        "different_steps",
        f"rank {rank} ended after {pluralize(steps, 'step')}, and the others wait for "
        f"it; one GPU made {wanted}",
        "let each rank make as many steps as the others: what ends the loop must not "
        "depend on a rank's own loss or rows",
        steps + 1,
        rank=rank,
    )


def _first_to_mend(label: str, failure: "_Failure | None", planned: Plan) -> str:
    """What to do about a run that failed."""
    text = failure.text if failure else ""
    if planned.ranks is None and needs_torchrun(text):
        return "start the program with torchrun: `torchrun --nproc-per-node=2 …`"
    if planned.gpus is None and not planned.real and any(words in text for words in NO_GPU):
        return f"the program needs GPUs: give --gpus {planned.ranks or 2} for virtual ones"
    return "mend that first: what it printed last stands above" + (
        _other_reference(planned) if label == "the reference" else ""
    )


def _other_reference(planned: Plan) -> str:
    hint = plan.with_one(planned.words)
    if hint:
        return f"; if it starts several ranks itself, give --reference {quoted(hint)}"
    if planned.ranks:
        return (
            "; if the program needs two ranks or more, prove 4 ranks with --against 2, or "
            "give --reference"
        )
    return "; if it cannot run on one GPU, give --reference"


def _first_failure(run: Run, records: list[RankRecord]) -> "_Failure | None":
    """The rank that failed first, if Python or the other ranks noticed it."""
    notes = [
        note
        for note in run.notes(FAILED_PREFIX)
        if not note["error"].startswith(("ChildFailedError", "ProcessRaisedException"))
    ]
    errors = [
        note for note in notes if not any(lost in note["error"] for lost in CONNECTION_LOST)
    ]
    if errors:
        first = errors[0]
        text = f" on rank {first['rank']}: {first['error']}"
        return _Failure(first["rank"], text, _end_of(run.with_own_paths(first["trace"])))
    silent = {record.rank for record in records} - {note["rank"] for note in notes}
    if notes and len(silent) == 1:
        rank = silent.pop()
        return _Failure(rank, f": rank {rank} died without a Python exception")
    return None


@dataclass(frozen=True)
class _Failure:
    """The rank that failed first, what is said of it, and its traceback."""

    rank: int
    text: str
    trace: str = ""


def _tail(run: Run) -> str:
    """The last lines that a run printed."""
    return _end_of(run.output)


def _end_of(text: str, most: int = 25) -> str:
    return "\n".join(text.rstrip().splitlines()[-most:])
