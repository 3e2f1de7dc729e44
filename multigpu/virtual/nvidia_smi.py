"""The program nvidia-smi of a run on virtual GPUs: `multigpu virtual` puts it on the PATH.

It prints the table, -L, --query-gpu and --query-compute-apps as NVIDIA's does. What is not
simulated, such as temperature and power, is N/A.
"""

import re
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from multigpu.errors import UserError
from multigpu.virtual import monitor
from multigpu.virtual.monitor import Status
from multigpu.virtual.visible import uuid

MIB = 2**20
NOT_SIMULATED = "[N/A]"
# The fields of real GPUs that are not simulated.
OTHER_FIELDS = re.compile(
    r"(temperature|power|clocks|clocks_\w+|utilization|ecc|pcie|encoder|mig|retired_pages|"
    r"fabric|inforom|gom|enforced)\..*"
    r"|fan\.speed|pstate|serial|gpu_serial|vbios_version|persistence_mode|accounting\..*"
)
NO_GPUS = 6


def main(arguments: Sequence[str]) -> NoReturn:
    """Print what the arguments ask for, and end the process with nvidia-smi's exit code."""
    try:
        lines = output(arguments)
    except UserError as error:
        print(error)
        raise SystemExit(2) from None
    with suppress(BrokenPipeError):
        print("\n".join(lines), flush=True)
    raise SystemExit(0 if lines != ["No devices were found"] else NO_GPUS)


def output(arguments: Sequence[str]) -> list[str]:
    """The lines that nvidia-smi prints. Raises UserError for what it cannot show."""
    parser = _Parser("nvidia-smi", add_help=False, allow_abbrev=False)
    parser.add_argument("-L", "--list-gpus", action="store_true")
    parser.add_argument("-i", "--id")
    parser.add_argument("--query-gpu")
    parser.add_argument("--query-compute-apps")
    parser.add_argument("--format", default="")
    wanted = parser.parse_args(arguments)
    gpus = monitor.statuses()
    if wanted.id is not None:
        names = [name.strip() for name in wanted.id.split(",")]
        gpus = [gpu for gpu in gpus if {str(gpu.number), uuid(gpu.number)} & set(names)]
    if not gpus:
        return ["No devices were found"]
    if wanted.list_gpus:
        return [f"GPU {gpu.number}: {gpu.name} (UUID: {uuid(gpu.number)})" for gpu in gpus]
    if wanted.query_gpu is not None:
        rows = [(gpu, None) for gpu in gpus]
        return _csv(wanted.query_gpu, _gpu_field, rows, wanted.format)
    if wanted.query_compute_apps is not None:
        rows = [(gpu, process) for gpu in gpus for process in gpu.processes]
        return _csv(wanted.query_compute_apps, _process_field, rows, wanted.format)
    return _table(gpus)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(
            f"nvidia-smi of virtual GPUs: {message}: use no option, -L, -i, "
            f"--query-gpu=index,name,memory.used --format=csv, or "
            f"--query-compute-apps=pid,used_memory --format=csv."
        )


Process = tuple[int, int]
# A field's value and unit. The value of what is not simulated has none.
Cell = tuple[str, str]


def _csv(
    query: str,
    read: Callable[[str, Status, Process | None], Cell],
    rows: Sequence[tuple[Status, Process | None]],
    form: str,
) -> list[str]:
    """The lines of a query: `read` gives the cell of a field, `form` is the --format."""
    options = [word.strip() for word in form.split(",")]
    if "csv" not in options or not set(options) <= {"csv", "noheader", "nounits"}:
        raise UserError('"--format=csv" is needed, with noheader and nounits if wanted.')
    names = [name.strip() for name in query.split(",")]
    cells = [[read(name, *row) for name in names] for row in rows]
    lines = [
        ", ".join(
            value if "nounits" in options or not unit or value == NOT_SIMULATED
            else f"{value} {unit}"
            for value, unit in row
        )
        for row in cells
    ]  # fmt: skip
    if "noheader" in options:
        return lines
    units = [_unit(name) for name in names]
    header = (
        f"{_shown(name)} [{unit}]" if unit else _shown(name)
        for name, unit in zip(names, units, strict=True)
    )
    return [", ".join(header), *lines]


def _unit(field: str) -> str:
    if field.startswith("memory.") or field in ("used_memory", "used_gpu_memory"):
        return "MiB"
    if field.startswith("utilization.") or field == "fan.speed":
        return "%"
    if field.startswith("power.") and field != "power.management":
        return "W"
    return "MHz" if field.startswith("clocks.") else ""


def _shown(field: str) -> str:
    """The name of a field in the header."""
    aliases = {"gpu_name": "name", "gpu_uuid": "uuid", "used_memory": "used_gpu_memory"}
    return aliases.get(field, field)


def _gpu_field(name: str, gpu: Status, process: Process | None = None) -> Cell:
    """The value and unit of a field of --query-gpu. Raises UserError for another name."""
    values = {
        "index": gpu.number,
        "count": len(monitor.statuses()) if name == "count" else 0,
        "name": gpu.name,
        "uuid": uuid(gpu.number),
        "pci.bus_id": _bus_id(gpu),
        "driver_version": monitor.DRIVER,
        "compute_cap": "{}.{}".format(*gpu.model.capability),
        "memory.total": gpu.capacity // MIB,
        "memory.used": -(-gpu.used // MIB),
        "memory.free": (gpu.capacity - gpu.used) // MIB,
        "memory.reserved": 0,
        "utilization.gpu": gpu.utilization,
        "display_active": "Disabled",
        "display_mode": "Disabled",
        "compute_mode": "Default",
        "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000"),
    }
    aliases = {"gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "pci.bus_id"}
    value = values.get(aliases.get(name, name))
    if value is None:
        if not OTHER_FIELDS.fullmatch(name):
            raise UserError(f'Field "{name}" is not a valid field to query.')
        value = NOT_SIMULATED
    return str(value), _unit(name)


def _process_field(name: str, gpu: Status, process: Process) -> Cell:
    """The value and unit of a field of --query-compute-apps. Raises UserError."""
    pid, nbytes = process
    if name == "pid":
        return str(pid), ""
    if name in ("used_memory", "used_gpu_memory"):
        return str(-(-nbytes // MIB)), "MiB"
    if name in ("process_name", "name"):
        return _program(pid), ""
    if name in ("gpu_name", "gpu_uuid", "gpu_bus_id", "gpu_serial", "timestamp"):
        return _gpu_field(name, gpu)
    raise UserError(f'Field "{name}" is not a valid field to query.')


def _bus_id(gpu: Status) -> str:
    return f"00000000:{gpu.number:02X}:00.0"


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
    except OSError:
        return "[Not Found]"


def _table(gpus: Sequence[Status]) -> list[str]:
    """The table that nvidia-smi prints without options."""
    cuda = "{}.{}".format(*monitor.CUDA)
    rule = f"+{'-' * 41}+{'-' * 24}+{'-' * 22}+"
    lines = [
        time.ctime(),
        f"+{'-' * 89}+",
        f"| NVIDIA-SMI {monitor.DRIVER:<22} Driver Version: {monitor.DRIVER:<14} "
        f"CUDA Version: {cuda:<8} |",
        f"|{rule[1:]}",
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A "
        "| Volatile Uncorr. ECC |",
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage "
        "| GPU-Util  Compute M. |",
        "|                                         |                        "
        "|               MIG M. |",
        f"|{'=' * 41}+{'=' * 24}+{'=' * 22}|",
    ]
    for gpu in gpus:
        name, used = f"{gpu.name[:24]:<24}{'N/A':>9}", -(-gpu.used // MIB)
        cells = (
            (f"{gpu.number:>3}  {name} ", f"  {_bus_id(gpu)} Off", "N/A"),
            (
                f"N/A   N/A    N/A{'N/A /  N/A ':>23}",
                f"{used}MiB / {gpu.capacity // MIB:>6}MiB",
                f"{gpu.utilization}%      Default",
            ),
            ("", "", "N/A"),
        )
        lines += ["| {:<39} | {:>22} | {:>20} |".format(*row) for row in cells]
        lines.append(rule)
    lines += [
        f" {'':89} ",
        f"+{'-' * 89}+",
        f"| {'Processes:':<87} |",
        f"| {' GPU   GI   CI        PID   Type   Process name':<76} GPU Memory |",
        f"| {'       ID   ID':<76} Usage      |",
        f"|{'=' * 89}|",
    ]
    processes = [(gpu, *process) for gpu in gpus for process in gpu.processes]
    for gpu, pid, nbytes in processes:
        memory = f"{-(-nbytes // MIB)}MiB"
        lines.append(
            f"| {gpu.number:>4}   N/A  N/A {pid:>10}      C   {_program(pid)[-40:]:<41}"
            f"{memory:>10} |"
        )
    if not processes:
        lines.append(f"| {' No running processes found':<87} |")
    return [*lines, f"+{'-' * 89}+"]


if __name__ == "__main__":
    main(sys.argv[1:])
