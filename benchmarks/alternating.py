"""Two processes that run in turn: a change of the machine's speed affects both equally."""

import statistics
import subprocess


def seconds_in_turn(workers: list[subprocess.Popen], rounds: int) -> list[tuple[float, ...]]:
    """Each worker's seconds, round by round; then end the workers.

    A worker answers each line on its standard input with the seconds of one run. Both pipes
    are text.
    """

    def ask(worker: subprocess.Popen) -> float:
        worker.stdin.write("go\n")
        worker.stdin.flush()
        return float(worker.stdout.readline())

    times = [tuple(ask(worker) for worker in workers) for _ in range(rounds)]
    for worker in workers:
        worker.communicate(timeout=60)
    return times


def spread(pairs: list[tuple[float, ...]]) -> dict:
    """The second time ÷ the first one: median, quartiles, and the number of rounds."""
    ratios = sorted(second / first for first, second in pairs)
    quartiles = (ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4])
    return {
        "median": round(statistics.median(ratios), 3),
        "quartiles": [round(quartile, 3) for quartile in quartiles],
        "rounds": len(ratios),
    }
