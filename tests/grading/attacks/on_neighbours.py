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

OWN = "each process has namespaces of its own"
OLD = "path = os.path.join(os.path.dirname(os.__file__), 'this.py')\n"


def _across(first: str, other: str) -> dict[str, str]:
    """Rank 0 runs one program for a second at most, the others another for so long."""
    code = f"""
programs = {first!r}, {other!r}
end = time.monotonic() + 1.5
def run():
    while True:
        try:
            return exec(programs[min(dist.get_rank(), 1)], globals())
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
if dist.get_rank():
    run()
else:
    threading.Thread(target=run, daemon=True).start()
"""
    return _mean(code, "import ctypes, os, socket, threading, time")


ATTACKS = [
    Attack(
        "a POSIX lock on a file that all see",
        "a message to the other rank, without the network",
        REFUSED,
        6,
        _mean(FILE + "fcntl.lockf(file, fcntl.LOCK_SH)"),
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
    Attack(
        "a socket between ranks, by name",
        "the other rank's tensor without a collective",
        OWN,
        6,
        _across(
            "server = socket.socket(socket.AF_UNIX); server.bind('\\0ranks'); server.listen()\n"
            "server.accept()[0].sendall(b'x')",
            "client = socket.socket(socket.AF_UNIX); client.connect('\\0ranks')\n"
            "assert client.recv(1)",
        ),
    ),
    Attack(
        "a file between ranks",
        "the other rank's tensor without a collective",
        "each process has a /tmp and a /dev/shm of its own",
        6,
        _across("open('/dev/shm/between', 'w').close()", "os.stat('/dev/shm/between')"),
    ),
    Attack(
        "a queue of messages between ranks",
        "the other rank's tensor without a collective (mq_open)",
        OWN,
        6,
        _across(
            f"{LIBC}assert libc.mq_open(b'/between', os.O_CREAT | os.O_RDWR, 0o666, None) >= 0",
            f"{LIBC}assert libc.mq_open(b'/between', os.O_RDWR) >= 0",
        ),
    ),
    Attack(
        "a signal between ranks",
        "the other rank's tensor without a collective",
        "it sees only its own processes",
        6,
        _across("time.sleep(0.1)", "for pid in range(2, 400): os.kill(pid, 0)"),
    ),
    Attack(
        "the time at which a file was read",
        "a message to the other rank in a file that both see",
        "files that all see are mounted read-only, and nothing is written to them",
        6,
        _across(
            f"{OLD}open(path, 'rb').read()",
            f"{OLD}before = os.stat(path).st_atime_ns\n"
            "time.sleep(0.5)\nassert os.stat(path).st_atime_ns > before",
        ),
    ),
    Attack(
        "netlink between ranks",
        "the other rank's tensor by a multicast of the kernel",
        OWN,
        6,
        _across(
            "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 2); s.bind((0, 1))\n"
            "for _ in range(20): s.sendto(b'x' * 16, (0, 1)); time.sleep(0.05)",
            "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 2); s.bind((0, 1))\n"
            "s.settimeout(1); assert s.recv(16)",
        ),
    ),
    Attack(
        "huge pages",
        "memory that no process's size shows (MAP_HUGETLB)",
        REFUSED,
        6,
        _total(
            "import errno, mmap\n"
            "try: mmap.mmap(-1, 2 << 20, flags=0x40022)\n"
            "except OSError as error: assert error.errno == errno.ENOMEM, error",
        ),
    ),
    Attack(
        "descriptors in flight",
        "more open files than the limit, kept in a socket",
        "the kernel counts descriptors that are sent, too",
        6,
        _total(
            "pair = socket.socketpair()\n"
            "for _ in range(100):\n"
            "    a, b = socket.socketpair()\n"
            "    socket.send_fds(pair[0], [b'x'], [a.fileno(), b.fileno()])\n"
            "    a.close(); b.close()"
        ),
    ),
    Attack(
        "more urgent than others",
        "the cores of the neighbour, by a real-time priority",
        "a process has no such right",
        6,
        _total("os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"),
    ),
    Attack(
        "memory that is never swapped",
        "1 GB that the kernel may not move (mlock)",
        "the kernel's limit of such memory",
        6,
        _total(
            f"{LIBC}import mmap\nroom = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE)\n"
            "place = ctypes.addressof(ctypes.c_char.from_buffer(room))\n"
            "result = libc.mlock(ctypes.c_void_p(place), ctypes.c_size_t(1 << 30))\n" + OR_FAIL
        ),
    ),
    Attack(
        "another descriptor's process",
        "an open file of the checks (pidfd_open, pidfd_getfd)",
        "it sees only its own processes",
        6,
        _total(
            f"{LIBC}result = libc.syscall(434, os.getppid() or 99, 0)\n" + OR_FAIL,
        ),
    ),
]
