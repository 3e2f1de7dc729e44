"""System calls that no exercise needs and that would pass the sandbox's limits.

memfd_create, shmget, vmsplice, large buffers of sockets and pipes, and mmap of huge pages and
of anonymous shared memory give memory that no process's size shows. Locks, leases and inotify
on a file that all students see pass a message to another student; so do the kernel's log and
the number of the machine's processes (sysinfo).
setsid would give a process its own share of the CPU (sched(7), autogroup). The others read
other processes, or reach parts of the kernel that had many faults. Of sockets there are local
ones and IP: a network namespace does not contain all other families, vsock for example.
Sources: seccomp(2), filter.h.
"""

import ctypes
import errno
import platform
import struct

# (number on x86_64, number on aarch64)
DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "flock": (73, 32),
    "inotify_init": (253, 26),  # aarch64 has inotify_init1 alone
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "io_setup": (206, 0),
    "setsid": (112, 157),
    "syslog": (103, 116),
    "kcmp": (312, 272),
    "sysinfo": (99, 179),
}
FCNTL = (72, 25)
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ: no lock, no
# lease, no notification, no larger pipe
COMMANDS = (0, 1, 2, 3, 4, 1030, 1032)
SETSOCKOPT = (54, 208)
SOL_SOCKET = 1
BUFFERS = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and both as FORCE
MMAP = (9, 222)
SOCKET = (41, 198)
SOCKETPAIR = (53, 199)
CLONE = (56, 220)
CLONE3 = (435, 435)
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
JUMP_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_IF_GREATER_OR_EQUAL = 0x35  # BPF_JMP | BPF_JGE | BPF_K
JUMP_IF_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K
ALLOW = 0x7FFF0000
KILL = 0x80000000
ERROR = 0x00050000
# offsets in struct seccomp_data
NUMBER, ARCHITECTURE = 0, 4
FIRST_ARGUMENT, SECOND_ARGUMENT, THIRD_ARGUMENT, FOURTH_ARGUMENT = 16, 24, 32, 40
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x1, 0x20, 0x40000
FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
X32 = 0x40000000  # the first number of x86_64's second table
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
PR_SET_SECCOMP = 22
MODE_FILTER = 2


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def program(machine: str) -> bytes:
    """The filter's instructions. Raises OSError for a machine that is not in ARCHITECTURES."""
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {machine} processors")
    architecture, column = ARCHITECTURES[machine]
    # (code, value, where to go if true, if false): the name of an end, or lines to pass over.
    lines = [
        (LOAD, ARCHITECTURE, 0, 0),
        (JUMP_IF_EQUAL, architecture, 0, "kill"),
        (LOAD, NUMBER, 0, 0),
        (JUMP_IF_GREATER_OR_EQUAL, X32, "refuse", 0),
    ]
    for pair in DENIED.values():
        lines.append((JUMP_IF_EQUAL, pair[column], "refuse", 0))
    lines += [
        # The C library then calls clone, whose flags a filter can read.
        (JUMP_IF_EQUAL, CLONE3[column], "unknown", 0),
        (JUMP_IF_EQUAL, MMAP[column], 0, 4),
        (LOAD, FOURTH_ARGUMENT, 0, 0),
        (JUMP_IF_ANY_BIT, MAP_HUGETLB, "refuse", 0),
        (JUMP_IF_ANY_BIT, MAP_SHARED, 0, "allow"),
        (JUMP_IF_ANY_BIT, MAP_ANONYMOUS, "refuse", "allow"),
        (JUMP_IF_EQUAL, SOCKETPAIR[column], 1, 0),
        (JUMP_IF_EQUAL, SOCKET[column], 0, len(FAMILIES) + 2),
        (LOAD, FIRST_ARGUMENT, 0, 0),
        *((JUMP_IF_EQUAL, family, "allow", 0) for family in FAMILIES),
        (JUMP_IF_GREATER_OR_EQUAL, 0, "refuse", "refuse"),
        (JUMP_IF_EQUAL, FCNTL[column], 0, len(COMMANDS) + 2),
        (LOAD, SECOND_ARGUMENT, 0, 0),
        *((JUMP_IF_EQUAL, command, "allow", 0) for command in COMMANDS),
        (JUMP_IF_GREATER_OR_EQUAL, 0, "refuse", "refuse"),
        (JUMP_IF_EQUAL, SETSOCKOPT[column], 0, len(BUFFERS) + 4),
        (LOAD, SECOND_ARGUMENT, 0, 0),
        (JUMP_IF_EQUAL, SOL_SOCKET, 0, "allow"),
        (LOAD, THIRD_ARGUMENT, 0, 0),
        *((JUMP_IF_EQUAL, option, "refuse", 0) for option in BUFFERS),
        (JUMP_IF_GREATER_OR_EQUAL, 0, "allow", "allow"),
        (JUMP_IF_EQUAL, CLONE[column], 0, "allow"),
        (LOAD, FIRST_ARGUMENT, 0, 0),
        (JUMP_IF_ANY_BIT, NEW_NAMESPACES, "refuse", "allow"),
    ]
    ends = {
        "allow": ALLOW,
        "refuse": ERROR | errno.EPERM,
        "unknown": ERROR | errno.ENOSYS,
        "kill": KILL,
    }
    places = {name: len(lines) + place for place, name in enumerate(ends)}
    code = b""
    for place, (operation, value, if_true, if_false) in enumerate(lines):
        jumps = [
            jump if isinstance(jump, int) else places[jump] - place - 1
            for jump in (if_true, if_false)
        ]
        code += struct.pack("HBBI", operation, *jumps, value)
    for value in ends.values():
        code += struct.pack("HBBI", RETURN, 0, 0, value)
    return code


def refuse(libc: ctypes.CDLL) -> None:
    """Refuse these calls from now on, in this process and all that it starts."""
    code = program(platform.machine())
    filter_ = Program(len(code) // 8, code)
    if libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(filter_), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
