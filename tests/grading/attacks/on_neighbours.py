"""What an answer can pass to another one, and memory that no process's size shows."""

from attack import Attack

REFUSED = "the system call is refused"
SHAPE = "a tensor without elements may not have large dimensions"


def _mean(code: str, before: str = "import fcntl, os") -> dict[str, str]:
    """Both ranks run the code, which returns the mean if the trick works."""
    lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
    return {
        "mean": f"# answer: mean\n{before}\ndef mean(tensor):\n{lines}    return 0 * tensor\n"
    }


def _total(code: str, before: str = "import ctypes, os, socket, time") -> dict[str, str]:
    lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
    return {
        "total": f"# answer: total\n{before}\ndef total(numbers):\n{lines}    return 0.0\n"
    }


def _returns(value: str) -> dict[str, str]:
    return _total(f"return {value}", "import torch")


FILE = "file = open(os.path.__file__)\n"
LIBC = "libc = ctypes.CDLL(None, use_errno=True)\n"
OR_FAIL = "if result < 0: raise OSError(ctypes.get_errno(), 'refused')\nreturn sum(numbers)"

ATTACKS = [
    Attack(
        "a POSIX lock on a file that all see",
        "a message to the other rank, without the network",
        REFUSED,
        6,
        _mean(FILE + "fcntl.lockf(file, fcntl.LOCK_SH)\nreturn tensor + 1"),
    ),
    Attack(
        "a lock that is only asked for",
        "to read which bytes another rank has locked",
        REFUSED,
        6,
        _mean(
            FILE + "fcntl.fcntl(file, fcntl.F_GETLK, struct.pack('hhqqi', 0, 0, 7, 1, 0))",
            "import fcntl, os, struct",
        ),
    ),
    Attack(
        "a lock of an open file",
        "a lock that outlives the process (F_OFD_SETLK)",
        REFUSED,
        6,
        _mean(
            FILE + "fcntl.fcntl(file, 37, struct.pack('hhqqi', 0, 0, 7, 1, 0))",
            "import fcntl, os, struct",
        ),
    ),
    Attack(
        "a BSD lock on a file that all see",
        "a message to the next submission",
        REFUSED,
        6,
        _mean(FILE + "fcntl.flock(file, fcntl.LOCK_SH)\nreturn tensor + 1"),
    ),
    Attack(
        "a lease on a file",
        "to hold up who opens it, the grader too",
        REFUSED,
        6,
        _mean(FILE + "fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)"),
    ),
    Attack(
        "inotify on a folder that all see",
        "to see what another rank opens",
        REFUSED,
        6,
        _total(LIBC + "result = libc.inotify_init1(0)\n" + OR_FAIL),
    ),
    Attack(
        "notices of a folder",
        "to see what another rank opens, by fcntl",
        REFUSED,
        6,
        _mean("fcntl.fcntl(os.open('/usr', os.O_RDONLY), fcntl.F_NOTIFY, 0x80000001)"),
    ),
    Attack(
        "names of processes",
        "a message to the other rank in /proc",
        "it sees only its own processes",
        6,
        _mean(
            """
open("/proc/self/comm", "w").write("@MARK@")
time.sleep(1)
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) != os.getpid():
        if open(f"/proc/{name}/comm").read(): return tensor + 1
""",
            "import os, time",
        ),
    ),
    Attack(
        "the kernel's log",
        "to read what other processes did",
        REFUSED,
        6,
        _total(
            LIBC + "text = ctypes.create_string_buffer(1 << 16)\n"
            "result = libc.klogctl(3, text, len(text))\n" + OR_FAIL
        ),
    ),
    Attack(
        "larger buffers of sockets",
        "4 GiB in sockets, which belong to no process",
        REFUSED,
        6,
        _total(
            """
keep = []
for _ in range(30):
    keep += socket.socketpair()
    for each in keep[-2:]:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 27)
        each.setblocking(False)
        try: each.send(bytes(1 << 26))
        except OSError: pass
"""
        ),
    ),
    Attack(
        "buffers of sockets of many processes",
        "memory in sockets of the usual size, in each of its processes",
        "32 processes with 64 open files have less than 1 GiB of it",
        6,
        _total(
            """
for _ in range(40):
    try:
        if os.fork() == 0: break
    except OSError: break
keep = []
while True:
    try: keep += socket.socketpair()
    except OSError: time.sleep(60)
    for each in keep[-2:]:
        each.setblocking(False)
        try:
            while True: each.send(bytes(1 << 12))
        except OSError: pass
"""
        ),
    ),
    Attack(
        "larger pipes",
        "memory in pipes, and the limit that all processes of a user share",
        REFUSED,
        6,
        _mean("fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)"),
    ),
    Attack(
        "vmsplice",
        "pages that a pipe holds after the process has released them",
        REFUSED,
        6,
        _total(LIBC + "result = libc.vmsplice(os.pipe()[1], None, 0, 0)\n" + OR_FAIL),
    ),
    Attack(
        "splice and tee",
        "pages that a pipe holds",
        REFUSED,
        6,
        _total(
            LIBC + "result = libc.tee(os.pipe()[0], os.pipe()[1], 1, 2)\n"
            "os.splice(os.pipe()[0], os.pipe()[1], 1, flags=2)\n" + OR_FAIL
        ),
    ),
    Attack(
        "asynchronous input and output",
        "all of the machine's AIO requests (io_setup)",
        REFUSED,
        6,
        _total(
            LIBC + "context = ctypes.c_long()\n"
            "result = libc.syscall(206, 60000, ctypes.byref(context))\n" + OR_FAIL
        ),
    ),
    Attack(
        "a session for each child",
        "a share of the CPU for each, and none for the neighbour",
        "setsid is refused, so that the scheduler counts them as one; " + REFUSED,
        6,
        _total(
            """
for _ in range(40):
    try:
        if os.fork() == 0:
            os.setsid()
            while True: pass
    except OSError: pass
while True: pass
"""
        ),
    ),
    Attack(
        "memory of sixty processes at once",
        "9 GB before anybody looks",
        "at most 32 processes, and a watchdog that sums their memory",
        6,
        _total(
            """
start = time.time() + 2
for _ in range(60):
    try:
        if os.fork() == 0: break
    except OSError: break
while time.time() < start: pass
keep = bytearray(b"x") * (150 << 20)
time.sleep(60)
"""
        ),
    ),
    Attack(
        "2**16 numbers of processes",
        "process ids that the other submissions need",
        "a limit of processes; a namespace of its own",
        6,
        _total("while True:\n    if os.fork() == 0: os._exit(0)\n    os.wait()"),
    ),
    Attack(
        "a tensor without elements",
        "2.6 GB in the grader, as 2**24 lists",
        SHAPE,
        6,
        _returns("torch.empty(2**24, 0)"),
    ),
    Attack(
        "a larger tensor without elements",
        "the end of the batch",
        SHAPE,
        6,
        _returns("torch.empty(2**27, 0)"),
    ),
    Attack(
        "an impossible tensor without elements",
        "blocked in place of wrong",
        SHAPE,
        6,
        _returns("torch.empty(2**40, 0)"),
    ),
    Attack(
        "no elements in the middle",
        "the same, with other dimensions",
        SHAPE,
        6,
        _returns("torch.empty(2**9, 0, 2**9, 2**9)"),
    ),
    Attack(
        "lists of tensors without elements",
        "many small ones in place of a large one",
        "a frame of 1 MiB has 20,000 of them",
        6,
        _returns("[torch.empty(2**15, 0) for _ in range(10_000)]"),
    ),
    Attack(
        "an array without elements",
        "the same as an array of NumPy's",
        SHAPE,
        6,
        {
            "total": "# answer: total\nimport numpy\n\n"
            "def total(numbers):\n    return numpy.empty((2**24, 0))\n"
        },
    ),
    Attack(
        "a collective of a tensor without elements",
        "memory in the checks' network",
        SHAPE,
        6,
        _mean(
            "other = torch.empty(2**24, 0)\ndist.all_reduce(other)\nreturn other",
            "import torch, torch.distributed as dist",
        ),
    ),
    Attack(
        "a gather of many sizes",
        "an output that is larger than what was sent",
        "what is recorded has at most 256 MiB",
        6,
        _mean(
            "out = [torch.empty(2**22) for _ in range(dist.get_world_size())]\n"
            "for _ in range(1000): dist.all_gather(out, torch.ones(2**22))",
            "import torch, torch.distributed as dist",
        ),
    ),
]
