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
    torchrun += ["--local-addr=127.0.0.1", "--nproc-per-node=2", str(PROGRAM)]

    def prove(case: tuple[str, str]) -> None:
        name, expected = case
        with section.item(name):
            began = time.monotonic()
            command = [*torchrun, section.device.type, *name.split()]
            found = session.run(command, timeout=60)
            cause = "" if found.cause is None else f": {found.cause.kind}"
            section.row(
                case=name,
                ok=f"{found.verdict}{cause}" == expected,
                expected=expected,
                found=found.line.removeprefix("proof: "),
                seconds=time.monotonic() - began,
                log=found.tail,
            )

    if section.device.type == "cuda":
        # So that two ranks run on the one GPU, and not on virtual ones.
        plan.real_gpus = lambda: 2
    with ThreadPoolExecutor(min(3, len(os.sched_getaffinity(0)) // 4 or 1)) as pool:
        list(pool.map(prove, (CASES[0], CASES[-1]) if section.quick else CASES))


if __name__ == "__main__":
    main(
        "The verdict of `multigpu prove` on a program with two gloo ranks on this GPU, and "
        "the expected verdict. With `own`, the ranks do not average their gradients.",
        {"ok": "", "expected": "", "found": "", "seconds": "s"},
        real,
    )
