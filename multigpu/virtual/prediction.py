"""The figures of one training step, from the records of a run: time, throughput, MFU."""

from dataclasses import dataclass
from math import isclose
from statistics import median_low

from multigpu.virtual.options import Options
from multigpu.virtual.record import Record, Step


@dataclass(frozen=True)
class StepFigures:
    """The figures of one process's step. The times are in simulated seconds.

    count        how many steps they are taken from
    start, end   the step that they describe: the one with the median time
    compute      the seconds in which a GPU computed
    communicate  the seconds in which it copied, or took part in collectives and messages
    exposed      the part of `communicate` in which it did not compute
    mfu          the utilisation of `peak` by the model's FLOPs, 0 to 1
    peak         the peak of the units that compute most, in FLOP/s; 0.0 without products
    """

    count: int
    start: float
    end: float
    compute: float
    communicate: float
    exposed: float
    mfu: float
    peak: float

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return self.end - self.start


def step_figures(record: Record) -> StepFigures | None:
    """The figures of the process's median step; None if its optimizer made no step.

    The first step is left out if there are others, because it begins with the program.

    MFU counts the model's FLOPs as three times those of the forward pass (backward has two
    products for each one of forward), so what is computed again in backward does not count:
    Chowdhery et al., "PaLM" (arXiv 2204.02311), appendix B.
    """
    steps = record.summary.steps
    gpus = len(record.summary.devices)
    if not steps or not gpus:
        return None
    begin = Step(0.0, 0.0, 0.0, 0.0, {})
    pairs = list(zip([begin, *steps], steps, strict=False))
    pairs = pairs[1:] or pairs
    middle = median_low(after.end - before.end for before, after in pairs)
    # The first such step: the record has its events. Equal steps differ by rounding.
    before, after = next(
        pair for pair in pairs if isclose(pair[1].end - pair[0].end, middle, rel_tol=1e-6)
    )
    seconds = after.end - before.end
    flops = {
        float(peak): count - before.flops.get(peak, 0.0) for peak, count in after.flops.items()
    }
    peak = max(flops, key=flops.__getitem__, default=0.0)
    mfu = 3 * sum(flops.values()) / (seconds * gpus * peak) if peak and seconds else 0.0
    compute = (after.compute - before.compute) / gpus
    return StepFigures(
        count=len(pairs),
        start=before.end,
        end=after.end,
        compute=compute,
        communicate=(after.communicate - before.communicate) / gpus,
        exposed=(after.busy - before.busy) / gpus - compute,
        mfu=mfu,
        peak=peak,
    )


@dataclass(frozen=True)
class Prediction:
    """The figures of a run's step: those of its slowest process."""

    options: Options
    slowest: StepFigures

    @classmethod
    def of(cls, records: list[Record], options: Options) -> "Prediction | None":
        """The prediction from the records of a run; None if no optimizer made a step."""
        measured = [figures for figures in map(step_figures, records) if figures is not None]
        if not measured:
            return None
        return cls(options, max(measured, key=lambda figures: figures.seconds))

    def per_second(self, per_step: int | None) -> float | None:
        """Samples or tokens a second of all ranks, from those of a step; None without them."""
        return None if per_step is None else per_step / self.slowest.seconds

    def as_json(self) -> dict[str, float | int | None]:
        """The figures: seconds, and shares from 0 to 1."""
        step = self.slowest
        return {
            "steps": step.count,
            "step_seconds": step.seconds,
            "samples_per_second": self.per_second(self.options.samples_per_step),
            "tokens_per_second": self.per_second(self.options.tokens_per_step),
            "mfu": step.mfu,
            "mfu_of_flops_per_second": step.peak,
            "compute_seconds": step.compute,
            "communicate_seconds": step.communicate,
            "exposed_seconds": step.exposed,
        }
