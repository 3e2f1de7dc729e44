"""How much longer the slowest of n ranks takes than the average rank.

A step of DDP ends when the slowest rank has given its gradients. If the ranks' times are
independent and normally distributed, the expected maximum of n of them is about

    mean + deviation · Φ⁻¹((n − 0.375) / (n + 0.25)),

with Φ⁻¹ the inverse of the normal distribution function. Source: Blom, "Statistical Estimates
and Transformed Beta-Variables" (1958). For n = 1 it is the mean; for n = 2 the factor is 0.589
(exactly 1/√π = 0.564), for n = 1,024 it is 3.24.

The default spread: identical GPUs of one cluster differ by 8% on average (Sinha et al., "Not
All GPUs Are Created Equal", SC22, arXiv 2208.11035; 22% at most, measured on V100, MI60 and
RTX 5000). Here the 8% are read as the range of 95% of the GPUs, four standard deviations.
"""

from statistics import NormalDist

SPREAD = 0.08 / 4


def slowest(ranks: int, spread: float = SPREAD) -> float:
    """The expected time of the slowest of `ranks` ranks ÷ the mean time.

    `spread` is the standard deviation of a rank's time ÷ its mean.
    """
    return 1 + spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
