"""What does Slurm need to be told so that one machine is a cluster? The places and texts of the classroom's files.

All state lives in one directory: /run/multigpu/slurm for root, whose cluster serves every user of the machine, and
~/.local/state/multigpu/slurm for an ordinary user, whose cluster runs that user's jobs alone.

The fields are explained in slurm.conf(5), gres.conf(5) and cgroup.conf(5). Tried with Slurm 22.05 (Debian 12), in
containers without /sys, with cgroup v1 and v2, and with host names that resolve to 127.0.0.1, to 127.0.1.1 (Debian's
own habit), to another address, and not at all.
"""

import os
import socket
from pathlib import Path

SYSTEM_CONF = Path(
    "/etc/slurm/slurm.conf"
)  # where Debian's Slurm looks when SLURM_CONF is not set
ROOT_STATE = Path(
    "/run/multigpu/slurm"
)  # /run is empty after a reboot: Slurm's systemd units find nothing to start
LOOPBACK = "127.0.0.1"
CPUS_PER_GPU = 8  # pretended, so that a job file written for a cluster passes
MEMORY_MB = 65536  # pretended, for a job file's --mem


def state_dir() -> Path:
    """The directory that holds everything about the cluster of the user who asks."""
    if os.geteuid() == 0:
        return ROOT_STATE
    return (
        Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
        / "multigpu/slurm"
    )


def conf_path() -> Path:
    """The slurm.conf of the cluster of the user who asks."""
    return state_dir() / "slurm.conf"


def linked() -> bool:
    """Whether the system's slurm.conf is root's cluster of ours (also where a reboot has emptied /run since)."""
    return SYSTEM_CONF.is_symlink() and os.readlink(SYSTEM_CONF) == str(
        ROOT_STATE / "slurm.conf"
    )


def node_names(nodes: int) -> list[str]:
    """n1, n2, …"""
    return [f"n{number}" for number in range(1, nodes + 1)]


def daemon_names(nodes: int) -> list[str]:
    """The daemons of such a cluster, in the order in which they start."""
    return ["munged", "slurmctld", *(f"slurmd {node}" for node in node_names(nodes))]


def shape() -> tuple[int, int] | None:
    """Nodes and GPUs per node of the cluster whose slurm.conf lies there; None where none does."""
    try:
        lines = conf_path().read_text().splitlines()
    except FileNotFoundError:
        return None
    nodes = [line for line in lines if line.startswith("NodeName=")]
    gpus = nodes[0].rpartition("Gres=gpu:")[2] if nodes and "Gres=" in nodes[0] else "0"
    return len(nodes), int(gpus)


def write(nodes: int, gpus_per_node: int, version: tuple[int, int]) -> None:
    """Write the cluster's directory: key, device links, slurm.conf, gres.conf, cgroup.conf.

    `version` is Slurm's, as in (22, 5). Raises OSError where the directory exists or cannot be written.
    """
    state = state_dir()
    state.mkdir(parents=True, mode=0o755)
    for part in ("controller", *node_names(nodes)):
        (state / part).mkdir(mode=0o755)
    (state / "munge.key").touch(mode=0o600)
    (state / "munge.key").write_bytes(os.urandom(1024))
    # Without this Slurm 22.05 looks for cgroup v2 and systemd, and slurmd ends in a container or as an ordinary user.
    # We use no cgroup at all; 22.05 cannot be told so, but its v1 plugin touches none until one is used.
    (state / "cgroup.conf").write_text(
        f"CgroupPlugin={'disabled' if version >= (23, 11) else 'cgroup/v1'}\n"
    )
    if gpus_per_node:
        for number in range(gpus_per_node):
            (state / f"gpu{number}").symlink_to(
                "/dev/null"
            )  # Slurm wants a device file for each GPU that it numbers
        gpus = f"Name=gpu File={state}/gpu[0-{gpus_per_node - 1}]"
        (state / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName={','.join(node_names(nodes))} {gpus}\n"
        )
    conf_path().write_text(slurm_conf(nodes, gpus_per_node))


def slurm_conf(nodes: int, gpus_per_node: int) -> str:
    """The text of slurm.conf, with ports that are free now. What a default says well enough is left out."""
    state, host, user = state_dir(), socket.gethostname().partition(".")[0], os.geteuid()
    controller_port, *node_ports = _free_ports(1 + nodes)
    gres = f" Gres=gpu:{gpus_per_node}" if gpus_per_node else ""
    node_lines = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr={LOOPBACK} Port={port}"
        f" CPUs={CPUS_PER_GPU * max(gpus_per_node, 1)} RealMemory={MEMORY_MB}{gres}"
        for name, port in zip(node_names(nodes), node_ports, strict=True)
    )
    return f"""\
# Written by `multigpu slurm up`, removed by `multigpu slurm down`.
ClusterName=multigpu-classroom
SlurmctldHost={host}({LOOPBACK})
SlurmctldPort={controller_port}
{_binding()}
# Every daemon runs as the user who started the cluster, with a munged of its own.
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={state}/munge.socket
StateSaveLocation={state}/controller
SlurmdSpoolDir={state}/%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/%n.pid
# The daemons stay in the foreground and write to their log files; the system's log is left alone.
SlurmctldSyslogDebug=quiet
SlurmdSyslogDebug=quiet
# Believe the CPUs and the memory below, not the hardware; no cgroups, which need systemd or privileges.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
# A job starts within a second of sbatch; with the default, 30, within three.
SchedulerParameters=bf_interval=1
# A job file may ask for mail; there is nobody to send it.
MailProg=/bin/true
# `sacct -c` lists from this file the jobs that ended. Plain `sacct` would need a database.
JobCompType=jobcomp/filetxt
JobCompLoc={state}/jobs.txt
# The addresses are numbers, so that no node's name has to resolve.
{node_lines}
PartitionName=classroom Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _binding() -> str:
    """Bind to the loopback address alone where Slurm can: it binds to what the machine's own name resolves to."""
    try:
        first = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0]
    except OSError:
        first = "no address"
    if first == LOOPBACK:
        return "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"
    return f"# This machine's name means {first} and not {LOOPBACK}, so Slurm listens on every address (munge guards it)."


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
