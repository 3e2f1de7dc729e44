"""What the launchers here share: start a process for each rank, and wait for all."""

import os
import socket
import subprocess
import sys


def run(commands: list[list[str]], variables: list[dict[str, str]]) -> None:
    """Run Python with each command and its variables at the same time, then exit.

    The exit code is that of a command that failed, or 0.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(commands)),
    }
    ranks = [
        subprocess.Popen([sys.executable, *command], env={**os.environ, **shared, **own})
        for command, own in zip(commands, variables, strict=True)
    ]
    sys.exit(max(abs(rank.wait()) for rank in ranks))
