"""A Jupyter kernel for tests: run cells, and interrupt them as the stop button does."""

import os
import queue
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager


@dataclass
class Cell:
    """What a cell gave: printed text, and its error's name, text and traceback."""

    printed: str = ""
    name: str = ""
    error: str = ""
    shown: list[str] = field(default_factory=list)


class PrivateKernel(KernelManager):
    """A kernel behind Unix sockets in a folder of its own.

    Jupyter chooses free TCP ports before the kernel starts. A program of another test can take
    one meanwhile, and the kernel dies.
    """

    def __init__(self, **options: object):
        self.sockets = tempfile.TemporaryDirectory()
        super().__init__(transport="ipc", ip=f"{self.sockets.name}/kernel", **options)


class Kernel:
    """A kernel of this Python in `folder`."""

    def __init__(self, folder: Path):
        self.manager = PrivateKernel(
            kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[])
        )
        environment = os.environ | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        }
        environment.pop("PYTEST_CURRENT_TEST", None)  # ipykernel then hides children's output
        self.manager.start_kernel(cwd=str(folder), env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.process = psutil.Process(self.manager.provisioner.pid)

    def run(self, source: str, interrupt_at: str = "", seconds: float = 60) -> Cell:
        """Run a cell to its end; interrupt it when it has printed `interrupt_at`."""
        cell = Cell()
        sent = self.client.execute(source, allow_stdin=False)
        deadline = time.monotonic() + seconds
        interrupted = False
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=deadline - time.monotonic())
            except (queue.Empty, ValueError):
                raise AssertionError(f"still running after {seconds} s: {cell}") from None
            if message["parent_header"].get("msg_id") != sent:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                cell.printed += content["text"]
            elif message["msg_type"] == "error":
                cell.name, cell.error = content["ename"], content["evalue"]
                cell.shown = content["traceback"]
            elif content.get("execution_state") == "idle":
                return cell
            if interrupt_at and interrupt_at in cell.printed and not interrupted:
                interrupted = True
                self.manager.interrupt_kernel()

    def descendants(self) -> list[psutil.Process]:
        """The processes that cells have started and that still run."""
        return list(filter(still_runs, self.process.children(recursive=True)))

    def stop(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def still_runs(process: psutil.Process) -> bool:
    """Whether a process runs that is no resource tracker. It can end while it is asked."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return "resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    """A kernel for a `with` block."""
    started = Kernel(folder)
    try:
        yield started
    finally:
        started.stop()


def wait_until(condition: Callable[[], bool], seconds: float = 15) -> bool:
    """Whether the condition becomes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
