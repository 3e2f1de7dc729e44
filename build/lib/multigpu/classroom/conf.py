"""The files of the classroom cluster: their paths and texts.

All state is in one directory. Root's is /run/multigpu/slurm; root's cluster serves every user
of the machine. An ordinary user's is ~/.local/state/multigpu/slurm; that user's cluster runs
only that user's jobs.

The fields are explained in slurm.conf(5), gres.conf(5) and cgroup.conf(5). Tested with Slurm
22.05 (Debian 12), in containers without /sys, with cgroup v1 and v2, and with host names that
resolve to 127.0.0.1, to 127.0.1.1 (Debian's default), to another address, and not at all.
"""

import os
import socket
from pathlib import Path

# Where Debian's Slurm looks if SLURM_CONF is not set.
SYSTEM_CONF = Path("/etc/slurm/slurm.conf")
# /run is empty after a reboot, so Slurm's systemd units find nothing to start.
ROOT_STATE = Path("/run/multigpu/slurm")
LOOPBACK = "127.0.0.1"
# Simulated, and large enough for the CPUs and --mem of job files for a real cluster.
CPUS_PER_GPU = 8
MEMORY_MB = 65536


def state_dir() -> Path:
    """The directory with all files of this user's cluster."""
    if os.geteuid() == 0:
        return ROOT_STATE
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state_home) / "multigpu/slurm"


def conf_path() -> Path:
    """The slurm.conf of this user's cluster."""
    return state_dir() / "slurm.conf"


def is_linked() -> bool:
    """Whether the system's slurm.conf is a link to the classroom cluster of root.

    After a reboot the link can remain, although /run is empty.
    """
    target = str(ROOT_STATE / "slurm.conf")
    return SYSTEM_CONF.is_symlink() and os.readlink(SYSTEM_CONF) == target


def node_names(nodes: int) -> list[str]:
    """The names of the nodes: n1, n2, …"""
    return [f"n{number}" for number in range(1, nodes + 1)]


def daemon_names(nodes: int) -> list[str]:
    """The daemons of a cluster with `nodes` nodes, in the order in which they start."""
    return ["munged", "slurmctld", *(f"slurmd {node}" for node in node_names(nodes))]


def cluster_shape() -> tuple[int, int] | None:
    """Nodes and GPUs per node in the cluster's slurm.conf; None if there is no such file."""
    try:
        lines = conf_path().read_text().splitlines()
    except FileNotFoundError:
        return None
    nodes = [line for line in lines if line.startswith("NodeName=")]
    gpus = 0
    if nodes and "Gres=" in nodes[0]:
        gpus = int(nodes[0].rpartition("Gres=gpu:")[2])
    return len(nodes), gpus


def write(nodes: int, gpus_per_node: int, version: tuple[int, int]) -> None:
    """Write the cluster's directory: key, device links, slurm.conf, gres.conf, cgroup.conf.

    `version` is Slurm's, as in (22, 5). Raises OSError if the directory exists or cannot be
    written.
    """
    state = state_dir()
    state.mkdir(parents=True, mode=0o755)
    for part in ("controller", *node_names(nodes)):
        (state / part).mkdir(mode=0o755)
    (state / "munge.key").touch(mode=0o600)
    (state / "munge.key").write_bytes(os.urandom(1024))
    # Without this setting Slurm 22.05 looks for cgroup v2 and systemd, and slurmd fails in a
    # container or for an ordinary user. The cluster uses no cgroups. 22.05 has no setting to
    # turn them off, but its v1 plugin creates no cgroup until one is used.
    plugin = "disabled" if version >= (23, 11) else "cgroup/v1"
    (state / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
    if gpus_per_node:
        # Slurm needs a device file for each GPU that it numbers.
        for number in range(gpus_per_node):
            (state / f"gpu{number}").symlink_to("/dev/null")
        gpus = f"Name=gpu File={state}/gpu[0-{gpus_per_node - 1}]"
        (state / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName={','.join(node_names(nodes))} {gpus}\n"
        )
    conf_path().write_text(slurm_conf(nodes, gpus_per_node))


def slurm_conf(nodes: int, gpus_per_node: int) -> str:
    """The text of slurm.conf, with ports that are free now. Defaults are left out."""
    state = state_dir()
    host = socket.gethostname().partition(".")[0]
    user = os.geteuid()
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
# Every daemon runs as the user who started the cluster, with the cluster's own munged.
SlurmUser={user}
SlurmdUser={user}
# cred_expire: a job that was requeued starts again after 15 s; the default is 120 s.
AuthInfo=socket={state}/munge.socket,cred_expire=15
StateSaveLocation={state}/controller
SlurmdSpoolDir={state}/%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/%n.pid
# The daemons stay in the foreground and write to their log files, not to the system's log.
SlurmctldSyslogDebug=quiet
SlurmdSyslogDebug=quiet
# Use the CPUs and memory below, not the hardware's; no cgroups, which need systemd or root.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
# A node whose slurmd does not answer for 30 s is down, and its jobs are requeued. The default
# is 300 s.
SlurmdTimeout=30
# A job starts within one second after sbatch; with the default, 30, within three seconds.
SchedulerParameters=bf_interval=1
# A job file can ask for mail; this cluster sends none.
MailProg=/bin/true
# `sacct -c` lists ended jobs from this file. Plain `sacct` would need a database.
JobCompType=jobcomp/filetxt
JobCompLoc={state}/jobs.txt
# The addresses are numeric, so no node's name has to resolve.
{node_lines}
PartitionName=classroom Nodes=ALL Default=YES MaxTime=INFINITE State=UP
# If a job of the partition `urgent` needs nodes, Slurm stops jobs of the partition `classroom`
# there, and puts them back into the queue.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def _binding() -> str:
    """The setting that binds Slurm to the address of the machine's own name.

    Slurm then listens on the loopback address only. If the name has another address, the
    setting is left out, and a comment in the file says so.
    """
    try:
        first = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0]
    except OSError:
        first = "no address"
    if first == LOOPBACK:
        return "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"
    return (
        f"# This machine's name resolves to {first}, not {LOOPBACK}, so Slurm listens on "
        f"every address (munge guards it)."
    )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind((LOOPBACK, 0))
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()
