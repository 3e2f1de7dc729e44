"""How many seconds a device works, from spans that arrive in pieces, in bounded memory."""

import numpy as np

# So many of the last gaps are kept, which spans that arrive late can still fill.
OPEN = 1000


class Busy:
    """The length of the union of spans of simulated time.

    A piece's spans are in any order, and can begin before those of earlier pieces: streams and
    threads log their work out of order. What lies before the last OPEN gaps is final.
    """

    def __init__(self) -> None:
        self._final_seconds = 0.0
        self._final_until = -np.inf
        # Disjoint, in order.
        self._starts = np.empty(0)
        self._ends = np.empty(0)

    def add(self, starts: np.ndarray, ends: np.ndarray) -> None:
        """Add spans: their starts and their ends, in seconds."""
        starts = np.concatenate((self._starts, np.maximum(starts, self._final_until)))
        ends = np.concatenate((self._ends, ends))
        longer = ends > starts
        order = np.argsort(starts[longer], kind="stable")
        starts = starts[longer][order]
        if not len(starts):
            return
        reached = np.maximum.accumulate(ends[longer][order])
        # A span begins a new part of the union if it begins after all earlier spans' ends.
        first = np.flatnonzero(np.append(True, starts[1:] > reached[:-1]))
        starts = starts[first]
        ends = reached[np.append(first[1:] - 1, -1)]
        final = max(len(starts) - OPEN, 0)
        if final:
            self._final_seconds += float((ends[:final] - starts[:final]).sum())
            self._final_until = float(ends[final - 1])
        self._starts = starts[final:]
        self._ends = ends[final:]

    @property
    def seconds(self) -> float:
        """The length of the union of all spans so far."""
        return self._final_seconds + float((self._ends - self._starts).sum())
