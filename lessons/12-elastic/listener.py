"""A rank that reports the signals that it receives, and does not end by them.

It ends when its torchrun has died, or after three minutes, and reports which of the two.
"""

import os
import signal
import time
from types import FrameType

# A handler must not print: Python refuses a print that interrupts another one.
received: list[int] = []


def note(number: int, frame: FrameType | None) -> None:
    received.append(number)


def report() -> None:
    """Print the signals received since the last report."""
    while received:
        print(f"rank: {signal.Signals(received.pop(0)).name}", flush=True)


def main() -> None:
    parent = os.getppid()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, note)
    print("rank: ready", flush=True)
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and os.getppid() == parent:
        report()
        time.sleep(0.05)
    why = "its torchrun has died" if os.getppid() != parent else "three minutes are over"
    # A signal to both can end torchrun before this rank has received it.
    time.sleep(0.5)
    report()
    print(f"rank: {why}", flush=True)


if __name__ == "__main__":
    main()
