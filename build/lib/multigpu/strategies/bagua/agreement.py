"""How ranks that do not wait for each other stop after the same batch.

In ddp the ranks exchange their flags (to stop, to interrupt) after every batch. In async no
rank waits, so the flags travel with the votes of the averaging rounds:

1. A rank that has a flag sends it with each vote, and trains on.
2. When a vote has shown a flag to all ranks, each rank pauses after its batch. With the votes,
   the ranks now send in which batch they are.
3. If a rank is in a later batch, the others train on to the end of this batch. The rank may be
   waiting for them there, for example in a validation.
4. When all ranks are paused after the same batch, the flags are agreed.
"""

import threading
from collections.abc import Callable

from multigpu.strategies.base import NUM_FLAGS

# A rank's position is epoch · EPOCH + batch.
EPOCH = 2**32


class Agreement:
    """The flags of this rank, and those that all ranks agree on.

    The training calls `after_batch` and `after_epoch`. The averaging thread calls `vote` and
    `count`. After an epoch the ranks wait for each other, and the flags are agreed there, too.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._own = [0] * NUM_FLAGS
        self._seen = [0] * NUM_FLAGS
        self._agreed = [0] * NUM_FLAGS
        self._position = 1  # the batch that this rank is in
        self._target = 0  # no pause before this position
        self._paused = False
        self._ended = False

    @property
    def pending(self) -> bool:
        """True if a vote has shown a flag that is not agreed yet."""
        return any(s > a for s, a in zip(self._seen, self._agreed, strict=True))

    def after_batch(self, flags: list[int]) -> list[int]:
        """Send the flags with the next votes. Returns the flags that are agreed.

        It waits only while the ranks agree on a flag.
        """
        with self._changed:
            self._own = [max(pair) for pair in zip(self._own, flags, strict=True)]
            if self.pending and self._position >= self._target:
                self._paused = True
                self._changed.wait_for(lambda: not self._paused or self._ended)
                self._paused = False
            self._position += 1
            return list(self._agreed)

    def after_epoch(
        self, flags: list[int], all_reduce_max: Callable[[list[int]], list[int]]
    ) -> list[int]:
        """Wait for all ranks, and agree on all flags since the run began."""
        with self._changed:
            own = [max(pair) for pair in zip(self._own, flags, strict=True)]
            self._own = own
            epoch = self._position // EPOCH
            self._position = epoch * EPOCH + EPOCH - 1
        agreed = all_reduce_max(own)
        with self._changed:
            self._agreed = agreed
            self._position = (epoch + 1) * EPOCH + 1
            return list(agreed)

    def vote(self) -> list[int]:
        """The numbers to send; their maximum over the ranks goes to `count`."""
        with self._changed:
            return [int(not self._paused), self._position, -self._position, *self._own]

    def count(self, numbers: list[int]) -> None:
        """Take the result of a vote, which is the same on all ranks."""
        any_runs, last, negative_first, *flags = numbers
        with self._changed:
            self._seen = flags
            if not self._paused:
                return
            if last > self._position:
                self._target = last
                self._paused = False
            elif not any_runs and last == -negative_first:
                self._agreed = flags
                self._paused = False
            self._changed.notify_all()

    def end(self) -> None:
        """The thread has ended: there are no more votes, so do not wait for them."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
