"""What an answer can pass to another one, and memory that no process's size shows.

Each answer is right if what it tries works, so that its score tells.
"""

from attack import Attack

REFUSED = "the system call is refused"
SHAPE = "a tensor without elements may not have large dimensions"


def _mean(code: str, before: str = "import fcntl, os") -> dict[str, str]:
    """Each rank runs the code, and then returns the mean."""
    text = "".join(f"    {line}\n" for line in code.strip().splitlines())
    right = "    dist.all_reduce(tensor)\n    return tensor / dist.get_world_size()\n"
    return {"mean": f"# answer: mean\n{before}\ndef mean(tensor):\n{text}{right}"}


def _total(code: str, before: str = "import ctypes, os, socket, time") -> dict[str, str]:
    text = "".join(f"    {line}\n" for line in code.strip().splitlines())
    right = "    return sum(numbers)\n"
    return {"total": f"# answer: total\n{before}\ndef total(numbers):\n{text}{right}"}


FILE = "file = open(os.path.__file__)\n"
LIBC = "libc = ctypes.CDLL(None, use_errno=True)\n"
OR_FAIL = "if result < 0: raise OSError(ctypes.get_errno(), 'refused')"
LOCK = "struct.pack('hhqqi', 0, 0, 7, 1, 0))"

ATTACKS = [
    Attack(
        "a lock that is only asked for",
        "to read which bytes another rank has locked",
        REFUSED,
        6,
        _mean(FILE + "fcntl.fcntl(file, fcntl.F_GETLK, " + LOCK, "import fcntl, os, struct"),
    ),
    Attack(
        "a lock of an open file",
        "a lock that outlives the process (F_OFD_SETLK)",
        REFUSED,
        6,
        _mean(FILE + "fcntl.fcntl(file, 37, " + LOCK, "import fcntl, os, struct"),
    ),
    Attack(
        "names of processes",
        "a message to the other rank in /proc",
        "it sees only its own processes",
        6,
        _mean(
            """
assert [name for name in os.listdir("/proc") if name.isdigit()]
""",
            "import os",
        ),
    ),
    Attack(
        "the kernel's log",
        "to read what other processes did",
        REFUSED,
        6,
        _total(LIBC + "result = libc.klogctl(10, None, 0)\n" + OR_FAIL),
    ),
    Attack(
        "sockets without end",
        "memory in sockets of the usual size",
        "a process has at most 64 open files",
        6,
        _total("keep = [socket.socketpair() for _ in range(60)]"),
    ),
    Attack(
        "tee",
        "pages that two pipes hold",
        REFUSED,
        6,
        _total(
            LIBC + "ends = [os.pipe(), os.pipe()]\nos.write(ends[0][1], b'x')\n"
            "result = libc.tee(ends[0][0], ends[1][1], 1, 2)\n" + OR_FAIL
        ),
    ),
    Attack(
        "asynchronous input and output",
        "all of the machine's AIO requests (io_setup)",
        REFUSED,
        6,
        _total(
            LIBC + "context = ctypes.c_long()\n"
            "result = libc.syscall(206, 1, ctypes.byref(context))\n" + OR_FAIL
        ),
    ),
    Attack(
        "a session for each child",
        "a share of the CPU for each, and none for the neighbour",
        "setsid is refused, so that the scheduler counts them as one",
        6,
        _total(
            """
if os.fork() == 0:
    try: os.setsid()
    except OSError: os._exit(1)
    os._exit(0)
assert os.wait()[1] == 0
"""
        ),
    ),
    Attack(
        "forty processes",
        "more than the cores, and their numbers",
        "at most 32 processes",
        6,
        _total(
            """
for _ in range(40):
    if os.fork() == 0: time.sleep(60)
"""
        ),
    ),
    Attack(
        "a collective of a tensor without elements",
        "memory in the checks' network",
        SHAPE,
        6,
        _mean(
            "dist.all_reduce(torch.empty(2**24, 0))", "import torch, torch.distributed as dist"
        ),
    ),
]
