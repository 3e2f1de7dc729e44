"""Speed-up, efficiency, and the laws of Amdahl and Gustafson.

Strong scaling: the work of a step is the same on any number of GPUs, and each GPU's part
shrinks. Weak scaling: each GPU's part is the same, and the work grows.

Amdahl, "Validity of the single processor approach" (1967): if a share s of one GPU's time
cannot be divided, n GPUs are 1 / (s + (1 − s)/n) times as fast.
Gustafson, "Reevaluating Amdahl's Law" (1988): if s is the serial share of the time on n GPUs,
whose work has grown with n, they do n − s (n − 1) times the work of one in the same time.
"""

from collections.abc import Sequence


def amdahl(share: float, gpus: float) -> float:
    """The speed-up on `gpus` GPUs with the same work, if a `share` of it is serial."""
    return 1 / (share + (1 - share) / gpus)


def gustafson(share: float, gpus: float) -> float:
    """The speed-up on `gpus` GPUs with `gpus` times the work."""
    return gpus - share * (gpus - 1)


def efficiency(speed_up: float, gpus: float) -> float:
    """The speed-up as a fraction of the number of GPUs."""
    return speed_up / gpus


def fit_amdahl(gpus: Sequence[float], speed_ups: Sequence[float]) -> float:
    """The serial share of Amdahl's law, by least squares over measured speed-ups.

    1 / speed-up − 1/n = s (1 − 1/n) is linear in s. Points with one GPU say nothing about s.
    An error of 1% in a speed-up counts with 0.01 / speed-up: few GPUs weigh most.
    A negative share means that GPUs were more than n times as fast.
    """
    rest = [1 - 1 / n for n in gpus]
    excess = [1 / speed_up - 1 / n for n, speed_up in zip(gpus, speed_ups, strict=True)]
    if not any(rest):
        raise ValueError("a serial share needs a measurement with more than one GPU")
    # The slope of the line through the origin.
    return sum(a * b for a, b in zip(rest, excess, strict=True)) / sum(a * a for a in rest)
