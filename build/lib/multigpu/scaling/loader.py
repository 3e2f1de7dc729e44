"""How long a step waits for its samples.

The workers of a DataLoader prepare samples while the GPU computes. Each worker prepares `rate`
samples per second, so w workers give w · rate. If the GPU needs samples faster than that, a
step takes as long as the workers need for its batch. Without workers the training process
prepares the samples itself, and the times add up: lesson 01 measures both.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Loader:
    """A GPU's DataLoader: its workers, and the samples/s that one of them prepares."""

    workers: int
    rate: float

    def step_seconds(self, samples: int, seconds: float) -> float:
        """Seconds of a step of `samples` samples that takes `seconds` if they are ready."""
        if self.workers == 0:
            return seconds + samples / self.rate
        return max(seconds, samples / (self.workers * self.rate))
