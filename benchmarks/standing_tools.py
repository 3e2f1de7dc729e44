"""How standing.py runs a script: the reference, and FakeGPU's two ways."""

import os
import subprocess
import time
from pathlib import Path
from typing import ClassVar

from standing_scripts import ROOT

from run import Run  # isort: skip, of tests/outside

SITE = ROOT / "tests" / "outside" / "site"
QUIET = {"FAKEGPU_TERMINAL_REPORT": "0"}
# Each process does what tests/outside does at its start, then starts FakeGPU.
START = """\
exec(open({site!r}).read())
import fakegpu
fakegpu.init(runtime="fakecuda", profile={profile!r}, device_count={gpus})
"""


class Compared(Run):
    """A script's run whose reference is made once for all tools."""

    made: ClassVar[dict[str, tuple]] = {}

    def _reference(self) -> tuple[int, str]:
        here = self.working / "reference"
        if self.case.name not in self.made:
            self.made[self.case.name] = (here, super()._reference())
        there, result = self.made[self.case.name]
        if there != here:
            here.symlink_to(there)
        return result


class FakeCUDA(Compared):
    """A script's run on FakeGPU's runtime for PyTorch on the CPU."""

    def __init__(self, python: str, profile: str, *given):
        super().__init__(*given)
        self.python, self.profile = python, profile

    def virtual(self) -> tuple[int, str]:
        folder, start = self._copy("virtual"), self.working / "start"
        start.mkdir(exist_ok=True)
        given = {"site": f"{SITE}/sitecustomize.py", "profile": self.profile}
        (start / "sitecustomize.py").write_text(START.format(gpus=self.case.gpus, **given))
        path = ":".join(map(str, [start, SITE, folder / self.case.python_path, self.packages]))
        return self._start(folder, self._with_python(), QUIET | {"PYTHONPATH": path})

    def _with_python(self) -> list[str]:
        command = self._command(self.case.command)
        if command[0] == "torchrun":
            command[:1] = ["-m", "torch.distributed.run"]
        return [self.python, *command]


class Native(FakeCUDA):
    """A script's run on FakeGPU's CUDA and NCCL libraries: test/run_ddp_multinode.sh."""

    def __init__(self, checkout: str, *given):
        super().__init__(*given)
        self.fakegpu = Path(checkout).resolve()

    def virtual(self) -> tuple[int, str]:
        folder, socket = self._copy("virtual"), str(self.working / "socket")
        config = str(self.fakegpu / "verification" / "data" / "cluster_valid.yaml")
        more = QUIET | {
            "FAKEGPU_COORDINATOR_TIMEOUT_MS": "60000",
            "FAKEGPU_DIST_MODE": "simulate",
            "FAKEGPU_CLUSTER_CONFIG": config,
            "FAKEGPU_COORDINATOR_TRANSPORT": "unix",
            "FAKEGPU_COORDINATOR_ADDR": socket,
        }
        coordinator = [str(self.fakegpu / "build" / "fakegpu-coordinator")]
        coordinator += ["--transport", "unix", "--address", socket]
        running = subprocess.Popen(
            coordinator, env=os.environ | more, stdout=subprocess.DEVNULL
        )
        try:
            time.sleep(1)
            command = [self.python, "-m", "fakegpu", "--mode", "simulate"]
            command += ["--dist-mode", "simulate", "--cluster-config", config]
            command += ["--coordinator-transport", "unix", "--coordinator-addr", socket]
            command += ["--profile", self.profile, "--device-count", str(self.case.gpus)]
            more["LD_PRELOAD"] = str(self.fakegpu / "build" / "libnccl.so.2")
            places = [SITE, folder / self.case.python_path, self.packages, self.fakegpu]
            more["PYTHONPATH"] = ":".join(map(str, places))
            return self._start(folder, command + self._with_python(), more)
        finally:
            running.terminate()
            running.wait()


class OneGenerator(Run):
    """A reference whose GPU draws its random numbers from the CPU's generator."""

    def _start(self, folder: Path, command: list[str], more: dict) -> tuple[int, str]:
        return super()._start(folder, command, {})
