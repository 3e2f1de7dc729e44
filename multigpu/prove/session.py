"""A proof: runs of the reference, the parallel run, their comparison, and the verdict."""

import shlex
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from multigpu.errors import UserError, pluralize
from multigpu.prove import alone, failures, plan, processes
from multigpu.prove.causes import Cause, find
from multigpu.prove.causes.rows import data_parallel_rows
from multigpu.prove.causes.scene import Scene, reference_rows
from multigpu.prove.compare import Comparison, Unmatched, compare, step_key
from multigpu.prove.failures import Unknown
from multigpu.prove.limits import largest, narrow, sharp
from multigpu.prove.plan import Plan
from multigpu.prove.processes import Run, quoted
from multigpu.prove.proof import Proof, Verdict
from multigpu.prove.record import RankRecord, Step
from multigpu.prove.settings import Order, Settings
from multigpu.virtual.command import command_line

# A run without a step for so many seconds hangs.
PATIENCE = 120.0
# A difference below this is compared with further runs that round otherwise: rounding can
# turn a ReLU on or off in one run and not in another.
SMALL = 0.01
# If limits grow wide, the runs are made once more with learning rates multiplied by this:
# their weights stay near each other, and each step is compared at almost the same weights.
SLOW = 1e-2
# The causes that rest on numbers alone.
NUMERIC = (
    "gradients",
    "own_mean",
    "optimizer_state",
    "update",
    "buffers",
    "compressed",
    "factor",
)
# The causes that a reference with a larger batch or in another order can answer.
OTHER_ROWS = (
    "fewer_rows",
    "other_rows",
    "own_data_sets",
    "rows_missing",
    "rows_repeated",
    "padding",
)
# The causes that a reference can answer whose own flag says that its batch is larger.
RATES = ("learning_rate", "scheduler")
# The units in the last place by which these runs disturb the weights, two runs at a time.
UNITS = ((2, 3), (4, 5))


def run(
    command: str | Sequence[str],
    *,
    gpus: int | None = None,
    steps: int | None = None,
    reference: str | None = None,
    against: int | None = None,
    self_check: bool = False,
    timeout: float = PATIENCE,
    no_dropout: bool = False,
    announce: Callable[[str], None] | None = None,
) -> Proof:
    """Run a training command and the same with one rank or one GPU, and compare them.

    command     as one types it, or its words: torchrun --nproc-per-node=2 train.py
    gpus        virtual GPUs; by default as many as ranks if the program says cuda
    steps       the optimizer steps to compare; by default one epoch and two steps if the
                epoch has at most 58, else 20
    reference   another command as the reference
    against     as the reference, the command with so many ranks, not one
    self_check  one run alone: whether its ranks agree with each other
    timeout     a run that makes no step for so many seconds hangs
    no_dropout  switch dropout and stochastic depth off in all runs
    announce    called with a sentence before each run

    Raises UserError for arguments that make no proof.
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    if not words:
        raise UserError("there is no command: give the command that trains.")
    if steps is not None and steps < 1:
        raise UserError(f"--steps is {steps}: give a number from 1 up.")
    if timeout <= 0:
        raise UserError(f"--timeout is {timeout:g}: give seconds above 0.")
    if self_check and (reference or against):
        raise UserError(
            "--self needs no reference: leave --reference and --against out, or leave --self "
            "out."
        )
    planned = plan.make(words, gpus, reference, against, self_check)
    with tempfile.TemporaryDirectory(
        prefix="multigpu-prove-", ignore_cleanup_errors=True
    ) as folder:
        session = Session(
            planned, Path(folder), steps, timeout, announce or (lambda text: None), no_dropout
        )
        try:
            return session.alone() if self_check else session.prove()
        except Unknown as unknown:
            return session.unknown(unknown.cause, tail=unknown.tail)
        except Unmatched as error:
            remedy = (
                "give the command of the same model with --reference; if stages of a pipeline "
                "are sharded, give their layers names of their own (layers.0, layers.1)"
            )
            return session.unknown(
                Cause("unmatched", str(error).rstrip("."), remedy, 1, unknown=True)
            )


class Session:
    """The runs of one proof, in a temporary folder."""

    def __init__(
        self,
        planned: Plan,
        folder: Path,
        steps: int | None,
        timeout: float,
        announce: Callable[[str], None],
        no_dropout: bool = False,
    ):
        self.plan = planned
        self.folder = folder
        self.steps = steps
        self.timeout = timeout
        self.announce = announce
        self.no_dropout = no_dropout
        self.notes: list[str] = []
        self.seconds: dict[str, float] = {}
        self.batch_times = 1
        self.order: Order | None = None
        # The number of GPUs that a reference of one rank sees.
        self.reference_gpus = 1
        self.started = 0
        # What learning rates are multiplied by, in all runs.
        self.rate = 1.0

    def proof(self, verdict: Verdict, line: str, **more: object) -> Proof:
        """A Proof with this session's commands, notes and seconds."""
        return Proof(
            verdict,
            line,
            processes.shown(self.plan.command),
            processes.shown(self.plan.reference or []),
            notes=self.notes,
            seconds=self.seconds,
            **more,
        )

    def unknown(self, cause: Cause, **more: object) -> Proof:
        """The proof that nothing can be said."""
        line = f"proof: nothing can be said: {cause.sentence}"
        return self.proof("unknown", line, cause=cause, **more)

    # ---- the runs --------------------------------------------------------------------------

    def prove(self) -> Proof:
        """Compare the command with its reference."""
        reference, bands = self.references(self.steps)
        reference_records = reference.records()
        steps = sum(step.optimizer == 0 for step in reference_records[0].steps)
        parallel = self.parallel_run(steps)
        others = parallel.records()
        if len(others) == 1 and _gpus(others) < 2:
            where = "one GPU" if _gpus(others) else "the CPU"
            raise Unknown(
                "one_rank",
                f"the command trained in one process, on {where}: nothing in it was parallel",
                "start it with `torchrun --nproc-per-node=2`, or give --gpus 2 if it uses "
                "several GPUs itself",
            )
        comparison = self.compare(reference_records, others, bands)
        cause = find(comparison)
        if cause and cause.kind in OTHER_ROWS and cause.step == 1:
            comparison, cause = self.with_the_same_rows(comparison, cause, others, steps)
        if cause and not cause.unknown:
            comparison, cause = self.with_more_bands(comparison, cause)
        if cause is None:
            comparison, cause = self.with_small_steps(comparison, steps)
        reordered = {name for step in comparison.steps for name in step.reordered}
        self.notes += [
            f"the buffer {name} has the numbers of the reference in another order, which "
            "changes no weight and no gradient in these steps"
            for name in sorted(reordered if cause is None else ())
        ]
        return self.concluded(comparison, cause, parallel)

    def references(self, steps: int | None) -> tuple[Run, list[Run]]:
        """Run the reference, and beside it the same with other rounding."""
        runs = [self.reference_run("reference", steps)]
        if self.plan.may_have_ranks:
            # At a fixed port, ranks of two runs would meet in one group.
            self.wait_for_all(runs)
            if self.takes_its_own_flag(runs[0]):
                return self.references(steps)
        runs.append(self.reference_run("rounding-1", steps, disturb=1))
        self.wait_for_all([run for run in runs if run.code is None and not run.waits])
        if (
            not runs[0].records()
            and self.plan.ranks
            and (self.plan.gpus or 1) > self.reference_gpus
        ):
            # Some programs want to see several GPUs also with one rank.
            self.reference_gpus = self.plan.gpus
            return self.references(steps)
        for place, run in enumerate(runs):
            if not run.completed and run.port_in_use:
                # The two runs want the same port.
                runs[place] = self.reference_run(f"{run.name}-again", steps, disturb=place)
                self.wait_for_all([runs[place]])
        self.check(runs, "the reference", optional=runs[1:])
        many = _world(runs[0].records())
        if many > self.plan.against and not self.plan.reference_given:
            raise Unknown(
                "same_ranks",
                f"the reference trained on {many} ranks, too, because the program itself "
                "starts them",
                "give its command for one rank with --reference",
            )
        return runs[0], [run for run in runs[1:] if _same_steps(run, runs[0])]

    def takes_its_own_flag(self, run: Run) -> bool:
        """Whether the program starts ranks itself, and a flag of its own for their number is
        now 1 in the reference's command.
        """
        command = plan.with_one(self.plan.words)
        alone = run.records() and _world(run.records()) == 1
        if (
            alone
            or self.plan.ranks is not None
            or self.plan.reference_given
            or command is None
        ):
            return False
        if self.plan.reference == command_line(command):
            return False
        self.plan = replace(self.plan, reference=command_line(command))
        self.notes.append(f"the reference ran as {processes.shown(command)}")
        return True

    def reference_run(self, name: str, steps: int | None, disturb: int = 0) -> Run:
        """Start the reference; with `disturb` it rounds otherwise."""
        gpus = self.plan.gpus
        if gpus and not self.plan.reference_given:
            gpus = max(self.plan.against, self.reference_gpus)
        alias = gpus == 1
        # A program that starts no ranks uses all GPUs that it sees.
        one_real = self.plan.real and not self.plan.reference_given and self.plan.ranks is None
        split = (self.plan.ranks or 2) if disturb else 1
        self.started += 1
        wishes = Settings(
            str(self.folder / f"{name}-{self.started}"),
            steps,
            disturb,
            split,
            self.batch_times,
            self.order,
            one_gpu=alias or one_real,
            no_dropout=self.no_dropout,
            rate=self.rate,
        )
        return processes.start(name, self.plan.reference, wishes, gpus, alias, one_real)

    def parallel_run(self, steps: int | None, local: bool = False) -> Run:
        """Run the command itself."""
        self.started += 1
        folder = str(self.folder / f"parallel-{self.started}")
        wishes = Settings(
            folder, steps, no_dropout=self.no_dropout, local=local, rate=self.rate
        )
        run = processes.start("parallel", self.plan.command, wishes, self.plan.gpus)
        self.wait_for_all([run])
        self.check([run], "the command")
        return run

    def wait_for_all(self, runs: list[Run]) -> None:
        """Wait until runs have ended."""
        self.announce(f"running: {processes.shown(runs[0].command)}")
        processes.wait(runs, self.timeout)
        for run in runs:
            self.seconds[run.name] = round(run.seconds, 2)

    def check(self, runs: list[Run], label: str, optional: Sequence[Run] = ()) -> None:
        """Raise Unknown if a run that is needed has made no step, or the reference failed."""
        for run in runs:
            if run not in optional and not run.records():
                raise failures.no_step(run, label, self.plan, self.timeout)
        if label == "the reference" and not runs[0].completed:
            raise failures.ended_badly(runs[0], label, self.plan, self.timeout)

    def compare(
        self, reference: list[RankRecord], others: list[RankRecord], bands: list[Run]
    ) -> Comparison:
        if not bands:
            self.notes.append(
                "the run with other rounding did not end as the reference did, so the limit "
                "is that of float32 sums alone"
            )
        return compare(reference, others, [run.records() for run in bands])

    def with_the_same_rows(
        self, comparison: Comparison, cause: Cause, others: list[RankRecord], steps: int
    ) -> tuple[Comparison, Cause | None]:
        """Compare with a reference whose DataLoaders read as all ranks together do.

        With a larger batch, in DistributedSampler's order, or both.
        """
        step = comparison.steps[0]
        alone = len(reference_rows(step.reference))
        together = sum(map(len, data_parallel_rows(Scene(comparison, step))))
        self.batch_times = max(1, together // alone)
        self.order = _order(step.reference[0], step.parallel[0], others[0])
        if together % alone or (self.batch_times == 1 and self.order is None):
            return comparison, cause
        try:
            reference, bands = self.references(steps)
        except Unknown:
            # A program that counts on its own batch size.
            return comparison, _with_command(cause, self.plan, self.batch_times)
        records = reference.records()
        if len(_first_rows(records)) != together:
            return comparison, _with_command(cause, self.plan, self.batch_times)
        comparison = self.compare(records, others, bands)
        cause = find(comparison)
        words = plan.with_batch_times(self.plan.reference, self.batch_times)
        if cause and cause.kind in RATES and self.batch_times > 1:
            result = words and self.with_its_flag(words, others, steps, together)
            if result:
                return result
            cause = _with_rate(cause, comparison, self.batch_times)
        if self.batch_times > 1:
            hint = f", as with --reference {quoted(words)}" if words and not self.order else ""
            ranks = "one rank" if len(records) == 1 else pluralize(len(records), "rank")
            self.notes.append(
                f"with {ranks} the program reads {alone} rows a step, {len(others)} ranks "
                f"read {together}: the reference ran with the batch size of its DataLoaders "
                f"multiplied by {self.batch_times}{hint}"
            )
        if self.order:
            self.notes.append(
                f"with one rank the program reads in the order of a {self.order.sampler}, so "
                "the reference ran in the order of the ranks' DistributedSampler"
            )
        return comparison, cause

    def with_its_flag(
        self, words: list[str], others: list[RankRecord], steps: int, together: int
    ) -> tuple[Comparison, Cause | None] | None:
        """Compare with a reference whose own flag makes its batch larger: its learning rate
        can depend on that. None if it reads other rows, or its rate is another one, too.
        """
        before = self.plan, self.batch_times
        self.plan, self.batch_times = replace(self.plan, reference=words), 1
        with suppress(Unknown):
            reference, bands = self.references(steps)
            records = reference.records()
            if len(_first_rows(records)) == together:
                comparison = self.compare(records, others, bands)
                cause = find(comparison)
                if cause is None or cause.kind not in RATES:
                    self.notes.append(
                        f"the reference ran as {processes.shown(words)}: it reads as many "
                        "rows a step as all ranks together, and its learning rate depends on "
                        "that number"
                    )
                    return comparison, cause
        self.plan, self.batch_times = before
        return None

    def with_more_bands(
        self, comparison: Comparison, cause: Cause
    ) -> tuple[Comparison, Cause | None]:
        """Look whether further runs that round otherwise explain a small difference."""
        if cause.kind not in NUMERIC:
            return comparison, cause
        step = next(step for step in comparison.steps if step.number >= cause.step)
        off = max(distances.relative()[0] for distances in step.kinds.values())
        if not off < SMALL:
            return comparison, cause
        steps = max(step.number for step in comparison.steps if step.key[0] == 0)
        bands = list(comparison.bands)
        for units in UNITS:
            runs = [self.reference_run(f"rounding-{unit}", steps, unit) for unit in units]
            self.wait_for_all(runs)
            bands += [run.records() for run in runs if _same_steps(run, comparison.reference)]
        again = compare(comparison.reference, comparison.parallel, bands)
        return again, find(again)

    def with_small_steps(
        self, comparison: Comparison, steps: int
    ) -> tuple[Comparison, Cause | None]:
        """Compare the steps of which rounding explains much in runs with small steps."""
        before = sharp(comparison)
        if len(before) == len(comparison.steps):
            return comparison, None
        self.rate = SLOW
        try:
            reference, bands = self.references(steps)
            parallel = self.parallel_run(steps)
        except Unknown:
            return comparison, None
        if not parallel.completed:
            return comparison, None
        again = self.compare(reference.records(), parallel.records(), bands)
        cause = find(again)
        if cause and not cause.unknown:
            again, cause = self.with_more_bands(again, cause)
        if cause and cause.unknown:
            return comparison, None
        done = {step.key for step in before}
        again.steps = before + [step for step in again.steps if step.key not in done]
        self.notes.append(
            f"rounding alone changes much from step {before[-1].number + 1} on: from there "
            f"runs were compared whose learning rates are divided by {1 / SLOW:,.0f}"
        )
        return again, cause

    # ---- the verdict -----------------------------------------------------------------------

    def concluded(self, comparison: Comparison, cause: Cause | None, parallel: Run) -> Proof:
        who, reference = self._who(comparison)
        cause = cause and self._named(cause)
        if cause and cause.unknown:
            return self.unknown(cause, comparison=comparison)
        if not parallel.completed and (cause is None or cause.kind == "different_steps"):
            cause = failures.rank_that_ended(parallel, comparison)
            if cause is None:
                raise failures.ended_badly(parallel, "the command", self.plan, self.timeout)
        if cause:
            return self.proof(
                "fails",
                f"proof: {who} differ from {reference} from step {cause.step} on: "
                f"{cause.sentence.removeprefix(f'in step {cause.step} ')}: fails",
                cause=cause,
                comparison=comparison,
            )
        if not comparison.steps:
            raise Unknown(
                "no_common_step",
                "the two runs have no step of the same optimizer in common",
                "give a command of the same program with --reference",
            )
        steps = narrow(comparison)
        if not steps:
            raise Unknown(
                "rounding",
                "rounding alone can change the gradients of the first step by half",
                "prove in float32, or with a larger batch",
            )
        difference, limit = largest(steps)
        count = sum(step.key[0] == 0 for step in steps)
        which = pluralize(count, "step")
        if len(steps) < len(comparison.steps):
            more = "prove in a wider type, such as float64, or with SGD"
            self.notes.append(
                f"from step {steps[-1].number + 1} on rounding alone can change gradients or "
                f"weights by half: what comes then was not compared ({more}, for more)"
            )
            which = (
                f"the first {count} of {sum(s.key[0] == 0 for s in comparison.steps)} steps"
            )
            comparison = replace(comparison, steps=steps)
        return self.proof(
            "holds",
            f"proof: {who} equal {reference} in {which}: largest difference "
            f"{difference:.1e}, rounding explains {limit:.0e}: holds",
            comparison=comparison,
        )

    def _who(self, comparison: Comparison) -> tuple[str, str]:
        ranks = len(comparison.parallel)
        gpus = _gpus(comparison.parallel)
        who = pluralize(gpus, "GPU") if ranks == 1 else pluralize(ranks, "rank")
        if self.plan.reference_given:
            larger = f", whose batch is {self.batch_times} times its own,"
            return who, f"the reference{larger if self.batch_times > 1 else ''}"
        if self.plan.against > 1:
            return who, pluralize(self.plan.against, "rank")
        return who, "1 GPU" if gpus else "1 rank"

    def _named(self, cause: Cause) -> Cause:
        """The cause; a reference that is not one GPU is called the reference."""
        if self.plan.against == 1 and not self.plan.reference_given:
            return cause
        sentence, remedy = (
            text.replace("on one GPU", "in the reference").replace("one GPU", "the reference")
            for text in (cause.sentence, cause.remedy)
        )
        return replace(cause, sentence=sentence, remedy=remedy)

    # ---- one run alone ---------------------------------------------------------------------

    def alone(self) -> Proof:
        """What one run says by itself."""
        run = self.parallel_run(self.steps, local=True)
        records = run.records()
        if len(records) < 2:
            raise Unknown(
                "one_rank",
                "the command trained on one rank, and --self compares several",
                "start it with `torchrun --nproc-per-node=2`",
            )
        result = alone.check(records)
        ranks = pluralize(len(records), "rank")
        if result.cause:
            return self.proof(
                "fails",
                f"proof: {ranks} disagree from step {result.cause.step} on: "
                f"{result.cause.sentence}: fails",
                cause=result.cause,
            )
        if not run.completed:
            raise failures.ended_badly(run, "the command", self.plan, self.timeout)
        self.notes += result.notes
        self.notes.append(
            "--self sees no fault that all ranks share: BatchNorm, a mean over a rank's own "
            "tokens, a factor, a learning rate"
        )
        return self.proof(
            "holds",
            f"proof: {ranks} agree with each other in {pluralize(result.steps, 'step')}: "
            f"{result.sentence}: holds",
        )


def _same_steps(run: Run, reference: "Run | list[RankRecord]") -> bool:
    """Whether a run has made the reference's steps, and skipped those that it skipped."""

    def steps(records: list[RankRecord]) -> list:
        return [(step_key(step), step.skipped) for step in records[0].steps]

    reference_records = reference.records() if isinstance(reference, Run) else reference
    records = run.records()
    return bool(records) and run.completed and steps(records) == steps(reference_records)


def _first_rows(reference: list[RankRecord]) -> np.ndarray:
    """The rows that a reference reads in its first step."""
    return reference_rows([record.steps[0] for record in reference])


def _gpus(records: list[RankRecord]) -> int:
    """The largest number of GPUs that a process has used."""
    return max(head.gpus for record in records for head in record.heads.values())


def _world(records: list[RankRecord]) -> int:
    """The number of ranks of a run, also of those that made no step; 0 without records."""
    return max((head.world for record in records for head in record.heads.values()), default=0)


def _order(reference: Step, parallel: Step, record: RankRecord) -> Order | None:
    """The order of the ranks' DistributedSampler, if the reference reads in another one."""
    reference_loader, parallel_loader = reference.loader, parallel.loader
    if (
        reference_loader is None
        or parallel_loader is None
        or parallel_loader.sampler != "DistributedSampler"
    ):
        return None
    if (
        reference_loader.sampler not in ("RandomSampler", "SequentialSampler")
        or reference_loader.rows != parallel_loader.rows
    ):
        return None
    if not (reference_loader.shuffle or parallel_loader.shuffle):
        return None
    epochs = {
        step.epoch: step.loader.set_epoch
        for step in record.steps
        if step.loader is not None and step.optimizer == 0
    }
    return Order(
        reference_loader.sampler,
        reference_loader.rows,
        parallel_loader.seed,
        parallel_loader.shuffle,
        [epochs[key] for key in sorted(epochs)],
    )


def _with_command(cause: Cause, planned: Plan, times: int) -> Cause:
    """The cause, with the --reference to give."""
    words = plan.with_batch_times(planned.reference, times)
    if words is None:
        return cause
    return replace(cause, remedy=f"{cause.remedy}, as in --reference {quoted(words)}")


def _with_rate(cause: Cause, comparison: Comparison, times: int) -> Cause:
    """The cause; what to do if the rate grows as the batch that the reference was given."""
    step = next(step for step in comparison.steps if step.number == cause.step)
    reference_rate, parallel_rate = (
        steps[0].options[0]["lr"] for steps in (step.reference, step.parallel)
    )
    if abs(parallel_rate - times * reference_rate) > 1e-6 * abs(parallel_rate):
        return cause
    remedy = (
        f"if the rate is meant to grow with the batch, give a --reference with {times} times "
        f"the batch size and {times} times the rate; if not, take the same rate, whatever the "
        "number of ranks"
    )
    return replace(cause, remedy=remedy)
