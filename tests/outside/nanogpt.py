"""nanoGPT's training on eight A100s, predicted, beside the time that its README gives.

    python tests/outside/nanogpt.py FOLDER   writes benchmarks/nanogpt.json

FOLDER is that of `make test-outside`. train.py runs unchanged, with its own sizes, as one rank
of eight; its data is a stand-in, and one evaluation instead of 200 comes before the steps.
"""

import sys
import tempfile
from pathlib import Path

import stand_in
import torch
from case import Case
from run import ROOT, Run, checked_folder, install

from multigpu.files import write_json

REPORT = ROOT / "benchmarks" / "nanogpt.json"
# README.md: GPT-2 (124M) on "a single 8XA100 40GB node in about 4 days of training".
# train.py: max_iters = 600000. The days have its evaluations and torch.compile in them.
DAYS = 4
STEPS = 600_000
TRAINING = Case(
    "nanoGPT",
    "nanoGPT",
    ".",
    "train.py --eval_iters=1",
    # Without a file meta.pkl, train.py takes GPT-2's vocabulary.
    data={
        f"data/openwebtext/{name}": f"shakespeare_char/{name}"
        for name in ("train.bin", "val.bin")
    },
)
OPTIONS = "--world 8 --gpu A100-40GB --link NVLink3 --shapes-only --steps 4"


def main() -> None:
    folder = checked_folder("".join(sys.argv[1:2]), "python tests/outside/nanogpt.py FOLDER")
    with tempfile.TemporaryDirectory(prefix="outside-") as temporary:
        data = Path(temporary, "data")
        stand_in.make(data)
        checkout = folder / "checkouts" / TRAINING.checkout
        run = Run(TRAINING, checkout, install(folder / "packages"), data, Path(temporary))
        run.options = OPTIONS
        code, output = run.virtual()
        if code:
            sys.exit(f"{output[-3000:]}\nerror: the script ended with exit code {code}.")
        report = run.report()
    repository, commit = (checkout / "COMMIT").read_text().split()
    seconds = {name: report[name]["step_seconds"] for name in ("step_at_peaks", "step")}
    published = DAYS * 24 * 3600 / STEPS
    write_json(
        REPORT,
        {
            "repository": repository,
            "commit": commit,
            "torch": torch.__version__,
            "command": f"multigpu virtual {OPTIONS} {TRAINING.command}",
            "seconds": seconds,
            "published_days": DAYS,
            "published_seconds": published,
            "error": seconds["step"] / published - 1,
        },
    )
    low, high = seconds["step_at_peaks"], seconds["step"]
    print(
        f"a step: {low * 1e3:.0f} to {high * 1e3:.0f} ms; published {published * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
