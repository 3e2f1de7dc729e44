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
    Attack(
        "timers until there are none",
        "a message: the kernel counts them for all ranks together",
        "a process has 64 at most, fewer than there are",
        6,
        _across(
            f"{LIBC}timer = ctypes.c_void_p()\n"
            "while libc.timer_create(1, None, ctypes.byref(timer)) == 0: pass\ntime.sleep(2)",
            f"{LIBC}timer = ctypes.c_void_p()\ntime.sleep(0.7)\n"
            "assert libc.timer_create(1, None, ctypes.byref(timer)) != 0",
        ),
    ),
    Attack(
        "bytes of message queues until there are none",
        "a message: the kernel counts them for all ranks together",
        "there are no message queues",
        6,
        _across(
            f"{LIBC}time.sleep(0.4)\n"
            "for n in range(50): libc.mq_open(b'/first%d' % n, 0o102, 0o600, None)\ntime.sleep(2)",
            f"{LIBC}assert libc.mq_open(b'/second', 0o102, 0o600, None) >= 0\n"
            "time.sleep(0.8)\nassert libc.mq_open(b'/third', 0o102, 0o600, None) < 0",
        ),
    ),
    Attack(
        "the number of the machine's processes",
        "a message to the other rank (sysinfo)",
        REFUSED,
        6,
        _across(
            "time.sleep(0.4)\nfor _ in range(25):\n"
            "    if os.fork() == 0: time.sleep(1); os._exit(0)\ntime.sleep(2)",
            f"{LIBC}room = (ctypes.c_char * 160)()\nprocesses = []\nfor _ in range(2):\n"
            "    assert libc.sysinfo(room) == 0\n    time.sleep(0.8)\n"
            "    processes.append(ctypes.c_ushort.from_buffer(room, 80).value)\n"
            "assert processes[1] - processes[0] > 15",
        ),
    ),
    Attack(
        "the machine's shared memory",
        "a message to the other rank (/proc/meminfo)",
        "/proc has a copy of the time when the process began",
        6,
        _across(
            "time.sleep(0.4)\nopen('/dev/shm/x', 'wb').write(bytes(50 << 20))\ntime.sleep(2)",
            "shared = []\nfor _ in range(2):\n"
            "    text = open('/proc/meminfo').read().partition('Shmem:')[2]\n"
            "    shared.append(int(text.split()[0]))\n    time.sleep(0.8)\n"
            "assert shared[1] - shared[0] > 40 << 10",
        ),
    ),
    Attack(
        "less urgent neighbours",
        "a low priority for all processes of the user (setpriority)",
        "it sees only its own processes",
        6,
        _across(
            "for _ in range(60): os.setpriority(os.PRIO_USER, 0, 15); time.sleep(0.05)",
            "assert os.getpriority(os.PRIO_PROCESS, 0) == 15",
        ),
    ),
    Attack(
        "sockets of other families",
        "parts of the kernel that no namespace divides: AF_ALG, vsock, packets and others",
        REFUSED,
        6,
        _total("""
for family in {*range(3, 46)} - {socket.AF_INET6, socket.AF_NETLINK}:
    for kind in (1, 2, 3, 5):
        try: return sum(numbers) if socket.socket(family, kind) else 0.0
        except OSError as error: refused = error
raise refused
"""),
    ),
    Attack(
        "the second table of system calls",
        "memfd_create by its number of x32",
        "all numbers of x32 are refused",
        6,
        _total(
            f"import errno\n{LIBC}result = libc.syscall(0x40000000 + 319, b'x', 0)\n"
            # A kernel without x32 says ENOSYS.
            f"if ctypes.get_errno() == errno.EPERM: {OR_FAIL[len('if result < 0: ') :]}"
        ),
    ),
    Attack(
        "system calls of a 32-bit program",
        "numbers that a filter for 64 bits takes for others (int 0x80)",
        "the kernel ends a process that calls them",
        6,
        _total(
            "import mmap\n"
            "code = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)\n"
            "code.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')  # getpid\n"
            "start = ctypes.addressof(ctypes.c_char.from_buffer(code))\n"
            "assert ctypes.CFUNCTYPE(ctypes.c_int)(start)() > 0"
        ),
    ),
    Attack(
        "a namespace by clone",
        "a child that has all rights over namespaces of its own (clone, clone3)",
        REFUSED,
        6,
        _total(f"""
{LIBC}
arguments = (ctypes.c_ulong * 8)(0x10000000, 0, 0, 0, 17)
result = libc.syscall(435, arguments, 64)
if result < 0: result = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
if result == 0: os._exit(0)
{OR_FAIL}
"""),
    ),
    Attack(
        "larger buffers of sockets",
        "memory that no process's size shows",
        REFUSED,
        6,
        _total(
            "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)"
        ),
    ),
    Attack(
        "a larger pipe",
        "memory that no process's size shows",
        REFUSED,
        6,
        _mean("fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 20)"),
    ),
    Attack(
        "a folder watched",
        "a message by who opens a file that all see (inotify, dnotify)",
        REFUSED,
        6,
        _total(
            f"import fcntl\n{LIBC}"
            "if libc.inotify_init1(0) < 0:\n"
            "    fcntl.fcntl(os.open('/usr/lib', os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS)"
        ),
    ),
    Attack(
        "terminals",
        "the machine's 4,096 pseudo-terminals",
        "there is no /dev/pts/ptmx",
        6,
        _total("os.openpty()"),
    ),
    Attack(
        "marks on a file that all see",
        "a message to another submission: its times, mode, attributes, links",
        "files that all see are mounted read-only, and belong to another user",
        6,
        _total("""
refused = None
for mark in (os.utime, lambda file: os.chmod(file, 0o755), lambda file: os.link(file, "/tmp/x"),
             lambda file: os.setxattr(file, "user.x", b"x")):
    try: return sum(numbers) if mark(os.__file__) is None else 0.0
    except OSError as error: refused = error
raise refused
"""),
    ),
]
