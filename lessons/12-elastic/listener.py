"""A rank that reports the signals that it receives, and does not end by them.

It ends when its torchrun has died, or after three minutes, and reports which of the two.
"""

import os
import signal
import time
from types import FrameType


def note(number: int, frame: FrameType | None) -> None:
    print(f"rank: {signal.Signals(number).name}", flush=True)


def main() -> None:
    parent = os.getppid()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, note)
    # torchrun notes a rank's process after its start; a signal before that ends torchrun only.
    time.sleep(1)
    print("rank: ready", flush=True)
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and os.getppid() == parent:
        time.sleep(0.05)
    why = "its torchrun has died" if os.getppid() != parent else "three minutes are over"
    print(f"rank: {why}", flush=True)


if __name__ == "__main__":
    main()
