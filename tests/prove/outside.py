"""Run `multigpu prove` on the public scripts of tests/outside/cases that train on many GPUs.

    python tests/prove/outside.py FOLDER [NAME…]   updates benchmarks/prove.json

FOLDER is that of `make test-outside`, see tests/outside/README.md: the scripts run in a copy,
with the same smaller literals and stand-in data. Nothing seeds them but `multigpu prove`.
"""

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "outside"))

import stand_in  # noqa: E402
import torch  # noqa: E402
from case import Case  # noqa: E402
from cases import CASES  # noqa: E402
from run import Run, _folder, checked_folder, install, install_pinned  # noqa: E402

from multigpu.files import write_json  # noqa: E402

REPORT = ROOT / "benchmarks" / "prove.json"
# Why the others cannot be compared with one GPU.
ONE_GPU = "it trains on one GPU"
NO_TRAINING = "it has no optimizer's step"
NOT_COMPARED = {
    "model_parallel_tutorial": "it compares one GPU with two itself, in one process",
    "data_parallel_tutorial": NO_TRAINING,
    "ncar_01_device_mesh_basics": NO_TRAINING,
    "ncar_01_manual_model_split": NO_TRAINING,
    "ncar_02_pipeline_schedules": NO_TRAINING,
    "pippy_example_manual_stage": NO_TRAINING,
    "princeton_02_simple_ddp": NO_TRAINING,
    "mnist": "it trains on one GPU of two",
    "jia-zhuang_single_gpu_train": "it is the reference of data_parallel_train.py",
    **{
        case.name: "it measures collectives, and trains nothing"
        for case in CASES
        if case.name.startswith("ml_engineering")
    },
}
LAUNCHER = "{helpers}/"  # its ranks are started in a way that `prove` does not know
OPTIONS = {
    "jia-zhuang_data_parallel_train": "--reference single_gpu_train.py",
    **dict.fromkeys(("csc_mnist_ddp", "csc_mnist_accelerate", "lumi_ddp_vit"), "--steps 4"),
    **dict.fromkeys(("ai_summer_ddp", "rentainhe_distributed"), "--steps 6"),
    "fsdp_tp": "--against 2",
    "lambdalabs_07_2d_parallel": "--gpus 4 --against 2",
    # These refuse one rank: the ranks of RANKS are compared with half as many.
    "tensor_parallel": "--against 2",
    "ncar_resnet_fsdp_training": "--against 2 --steps 2",
    "ncar_01_fsdp_tp_hybrid": "--against 4",
    **{
        f"picotron_{name}": "--reference 'torchrun --nproc_per_node 1 --master_addr "
        f"localhost --master_port {port} train.py --config picotron_one.json'"
        for name, port in (("tensor_and_pipeline", 25500), ("context_and_data", 25501))
    },
    "lightning_fabric_fsdp2_tp": "--reference one.py",
    **dict.fromkeys(
        (
            "imagenet_folder_data_parallel",
            "minGPT-ddp",
            "harvard_mnist_ddp",
            "princeton_02_mnist_ddp",
            "lightning_fabric_ddp",
            "dino_fp32",
            "dino_fp16",
        ),
        "--no-dropout",
    ),
}
# The number of ranks of the command, where the case has another one.
RANKS = {"tensor_parallel": 4, "ncar_resnet_fsdp_training": 4, "ncar_01_fsdp_tp_hybrid": 8}
# What a reference needs: a copy of a file, with other literals.
ONE_RANK = [('_size": 2', '_size": 1')]
COPIES = {
    "picotron_tensor_and_pipeline": ("picotron_tp.json", "picotron_one.json", ONE_RANK),
    "picotron_context_and_data": ("picotron_cp.json", "picotron_one.json", ONE_RANK),
    "lightning_fabric_fsdp2_tp": (
        "train.py",
        "one.py",
        [("devices=4", "devices=2"), ("tensor_parallel_size=2", "tensor_parallel_size=1")],
    ),
}


class Proof(Run):
    """`multigpu prove` on one script, in a copy of its folder."""

    # prove itself ends a run that hangs.
    seconds = 3600

    def row(self) -> dict:
        """The verdict as a row of the table."""
        repository, commit = (self.checkout / "COMMIT").read_text().split()
        options = prove_options(self.case)
        folder = self._copy("prove")
        if self.case.name in COPIES:
            original, copy, literals = COPIES[self.case.name]
            text = (folder / original).read_text()
            for old, new in literals:
                text = text.replace(old, new)
            (folder / copy).write_text(text)
        report = self.working / "proof.json"
        command = [str(Path(sys.executable).parent / "multigpu"), "prove", "--timeout", "600"]
        command += [*map(self._filled, options), "--json", str(report)]
        started = time.monotonic()
        code, output = self._start(folder, [*command, *self._command(self.case.command)], {})
        seconds = round(time.monotonic() - started, 1)
        found = json.loads(report.read_text()) if report.exists() else {}
        last = ([""] + [text for text in output.splitlines() if text.strip()])[-1]
        cause = found.get("cause") or {}
        shown = " ".join(f"'{word}'" if " " in word else word for word in options)
        return {
            "name": self.case.name,
            "repository": repository,
            "commit": commit,
            "torch": torch.__version__,
            "command": " ".join(f"multigpu prove {shown} {self.case.command}".split()),
            "verdict": found.get("verdict", f"error {code}"),
            "line": self._without_paths(found.get("line", last)),
            "cause": cause.get("kind"),
            "to_do": self._without_paths(cause.get("remedy", "")),
            "seconds": seconds,
        }

    def _filled(self, option: str) -> str:
        return " ".join(self._command(option))

    def _without_paths(self, text: str) -> str:
        text = text.replace(str(ROOT / "tests" / "outside" / "launch"), "{helpers}")
        return re.sub(r"(/[\w.+-]+){2,}/", "…/", text)


def prove_options(case) -> list[str]:
    """The words between `multigpu prove` and the command."""
    given = OPTIONS.get(case.name, "")
    words = [part.strip("'") for part in re.findall(r"'[^']*'|\S+", given)]
    if case.command.startswith(LAUNCHER) and "--reference" not in words:
        # One GPU is there, and some compare its number with Slurm's.
        one = re.sub(r"\{gpus\}", "1", case.command)
        words += ["--reference", f"env CUDA_VISIBLE_DEVICES=0 python {one}"]
    if "torchrun" not in case.command and "--gpus" not in words:
        words += ["--gpus", str(case.gpus)]
    return words


def with_ranks(case: Case) -> Case:
    """The case with the number of ranks of RANKS, if it has one."""
    ranks = RANKS.get(case.name)
    if ranks is None:
        return case
    command = re.sub(r"(nproc_per_node=)\d+", rf"\g<1>{ranks}", case.command)
    return replace(case, command=command, gpus=ranks)


def main() -> None:
    # So that a proof that is ended ends its program, too.
    signal.signal(signal.SIGTERM, lambda *given: sys.exit(143))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="a folder with checkouts/, see tests/outside/README.md")
    parser.add_argument("names", nargs="*", help="cases of tests/outside/cases")
    parser.add_argument("--report", type=Path, default=REPORT, help="the JSON file to update")
    arguments = parser.parse_intermixed_args()
    folder = checked_folder(arguments.folder, "python tests/prove/outside.py FOLDER")
    reasons = {case.name: ONE_GPU for case in CASES if case.gpus == 1} | NOT_COMPARED
    cases = [case for case in CASES if case.name not in reasons]
    if arguments.names:
        cases = [case for case in cases if case.name in arguments.names]
    packages = install(folder / "packages")
    with tempfile.TemporaryDirectory(prefix="outside-") as temporary:
        data = Path(temporary, "data")
        stand_in.make(data)
        for case in cases:
            checkout = folder / "checkouts" / case.checkout
            if not (checkout / case.script).exists():
                print(f"{case.name:<28} is not in the folder")
                continue
            if case.packages:
                install_pinned(folder / _folder(case.packages), case.packages)
            working = Path(temporary, case.name)
            case = replace(with_ranks(case), seeded=True)
            row = Proof(case, checkout, packages, data, working).row()
            print(f"{row['name']:<28} {row['seconds']:>6} s  {row['line']}", flush=True)
            shutil.rmtree(working)
            update(arguments.report, row, reasons)


def update(report: Path, row: dict, reasons: dict[str, str]) -> None:
    """Put the row in the place of that of the same name; other keys of the file stay."""
    content = json.loads(report.read_text()) if report.exists() else {}
    rows = {one["name"]: one for one in content.get("outside", {}).get("rows", [])}
    rows[row["name"]] = row
    ordered = [rows[case.name] for case in CASES if case.name in rows.keys() - reasons.keys()]
    write_json(report, {**content, "outside": {"rows": ordered, "not_compared": reasons}})


if __name__ == "__main__":
    main()
