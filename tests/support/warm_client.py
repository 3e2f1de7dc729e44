"""The command of warm.python(): run a program in a fork of the warm process, as if here.

`warm_client.py FOLDER NAME ARGUMENTS…`: the folder of the sockets, python or a name of
PROGRAMS, and the arguments. The program gets this process's open files, environment and
working directory; signals are passed on, and the exit code is the program's. Python itself
runs what a fork cannot: another option than -u, -B, -c and -m, no arguments, other settings of
Python, another network namespace than the warm process's.
"""

import contextlib
import json
import os
import re
import signal
import socket
import sys

FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCONT")
# Settings that Python reads at its start, which a fork cannot change.
SETTINGS = ("WARNINGS", "DEVMODE", "OPTIMIZE", "UTF8", "IOENCODING", "SAFEPATH")
HASH_SEED = "0"  # the warm process's

# The arguments of Python with which a program starts.
PROGRAMS = {
    "torchrun": ["-c", "from torch.distributed.run import main; main()"],
    "multigpu": ["-m", "multigpu.cli"],
}

ENDED = "the warm process of tests/support/warm.py has ended: run one test with -s to see why."


def program(name: str, arguments: list[str]) -> list[str] | None:
    """The arguments that a fork runs; None if Python itself must run them."""
    if os.environ.get("PYTHONHASHSEED", HASH_SEED) != HASH_SEED:
        return None
    if name in PROGRAMS:
        return [*PROGRAMS[name], *arguments]
    while arguments and arguments[0] in ("-u", "-B"):
        arguments = arguments[1:]
    if not arguments or any(f"PYTHON{name}" in os.environ for name in SETTINGS):
        return None
    if arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        return None
    return arguments


def imported(arguments: list[str]) -> str:
    """What the program imports, by its parent process or its text: "torch" or "tensorflow"."""
    if "WARM_IMPORTED" in os.environ:
        return os.environ["WARM_IMPORTED"]
    text = arguments[1] if arguments[0] == "-c" else ""
    for argument in arguments:
        if argument.endswith(".py") and os.path.isfile(argument):
            with open(argument) as file:
                text = file.read()
            break
    found = re.search(r"\bTF_CNN|import tensorflow|tf_common|import keras", text)
    return "tensorflow" if found else "torch"


def open_files() -> list[int]:
    files = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # the listing's own
        files.append(int(name))
    return sorted(files)


def number_from(connection: socket.socket) -> int:
    answer = connection.recv(8, socket.MSG_WAITALL)
    if len(answer) < 8:
        sys.exit(ENDED)
    return int.from_bytes(answer, "little", signed=True)


def main() -> None:
    folder, name, *given = sys.argv[1:]
    arguments = program(name, given)
    with open(os.path.join(folder, "network")) as file:
        same_network = file.read() == os.readlink("/proc/self/ns/net")
    if arguments is None or not same_network:
        os.execv(sys.executable, [sys.executable, *PROGRAMS.get(name, []), *given])
    files = open_files()
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "files": files,
        "pid": os.getpid(),
        "unbuffered": "-u" in given[:2] or "PYTHONUNBUFFERED" in os.environ,
    }
    text = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.path.join(folder, f"{imported(arguments)}.socket"))
        socket.send_fds(connection, [len(text).to_bytes(8, "little")], files)
        connection.sendall(text)
    except ConnectionError:
        sys.exit(ENDED)
    child = number_from(connection)

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ends just now
            os.kill(child, number)

    for signal_name in FORWARDED:
        signal.signal(getattr(signal, signal_name), forward)
    code = number_from(connection)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
