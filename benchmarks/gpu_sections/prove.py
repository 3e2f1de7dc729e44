"""Section: `multigpu prove` with the GPU: right programs hold, a wrong one fails.

Two ranks share the GPU over gloo, because NCCL refuses that. A GPU adds in another order than
the CPU, and not always in the same: the limits that `multigpu prove` measures must cover it.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from section import Section, main

from multigpu.prove import plan, session

PROGRAM = Path(__file__).with_name("prove_program.py")
RIGHT = Path(__file__).resolve().parents[2] / "tests" / "prove" / "right" / "amp_bf16.py"
# What the program is given, and the verdict with the kind of the cause.
CASES = (
    ("cnn fp32", "holds"),
    ("cnn tf32", "holds"),
    ("gpt bf16", "holds"),
    ("gpt fp16", "holds"),
    ("cnn fp32 own", "fails: not_averaged"),
)


def real(section: Section) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--local-addr=127.0.0.1", "--nproc-per-node=2"]

    def try_case(case: tuple[str, str]) -> None:
        name, expected = case
        with section.item(name):
            command = [*torchrun, PROGRAM, section.device.type, *name.split()]
            prove(section, name, command, expected)

    with ThreadPoolExecutor(min(3, len(os.sched_getaffinity(0)) // 4 or 1)) as pool:
        if section.device.type == "cuda":
            # So that two ranks run on the one GPU, and not on virtual ones.
            plan.real_gpus = lambda: 2
        list(pool.map(try_case, CASES[:1] if section.quick else CASES))
    if section.device.type == "cuda":
        plan.real_gpus = lambda: 1
        with section.item("one GPU, so two virtual ones"):
            prove(section, "one GPU, so two virtual ones", [*torchrun, RIGHT], "holds")


def prove(section: Section, case: str, command: list, expected: str) -> None:
    """Add the row of a proof."""
    began = time.monotonic()
    found = session.run(list(map(str, command)), timeout=60)
    verdict = found.verdict if found.cause is None else f"{found.verdict}: {found.cause.kind}"
    section.row(
        case=case,
        ok=verdict == expected,
        line=found.line.removeprefix("proof: "),
        seconds=round(time.monotonic() - began, 1),
        runs=found.seconds,
        **({"log": found.tail} if found.tail else {}),
    )


if __name__ == "__main__":
    main(real)
