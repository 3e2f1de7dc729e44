"""What an answer can do to the machine: time, processes, memory, disk, output, signals."""

from attack import Attack

TIME = "the time limit of a check; the namespace of its processes ends with it"
MEMORY = "a watchdog sums the memory of all processes of a check, or the time limit if it is earlier"
NAMESPACE = "it sees only its own processes, and all of them end with it"


def _call(code: str, before: str = "") -> dict[str, str]:
    lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
    return {
        "total": f"# answer: total\n{before.strip()}\ndef total(numbers):\n{lines}    return 0.0\n"
    }


MAP = """
import ctypes, mmap, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                      ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def map(size, flags, fd=-1, rights=3):
    address = libc.mmap(None, size, rights, flags, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return address
"""
# A child keeps the memory alive that its parent has written and released.
HIDE = """
size = 1 << 28
for _ in range(24):
    address = map(size, {flags}, {fd})
    if os.fork() == 0:
        time.sleep(60)
    libc.memset(address, 1, size)
    libc.munmap(address, size)
time.sleep(60)
"""

ATTACKS = [
    Attack(
        "an endless loop",
        "the time of the batch",
        TIME,
        6,
        _call("while True: pass"),
    ),
    Attack(
        "a loop that ignores interrupts",
        "the time of the batch",
        TIME,
        6,
        _call(
            """
while True:
    try:
        time.sleep(1)
    except BaseException:
        pass
""",
            """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
""",
        ),
    ),
    Attack(
        "an endless loop in each question",
        "six times the time limit, for each submission",
        "a question has the time of two checks, a submission that of six",
        0,
        {
            "mean": "# answer: mean\ndef mean(tensor):\n    while True: pass\n",
            "guess_bytes": "# answer: guess_bytes\nwhile True: pass\n",
            "total": "# answer: total\ndef total(numbers):\n    while True: pass\n",
        },
    ),
    Attack(
        "a fork bomb",
        "all processes of the machine",
        "a limit of processes; " + NAMESPACE,
        6,
        _call("while True:\n    try: os.fork()\n    except OSError: pass", "import os"),
    ),
    Attack(
        "memory of one process",
        "all memory of the machine",
        MEMORY,
        6,
        _call(
            "keep = [bytearray(b'x' * (64 << 20)) for _ in range(52)]\ntime.sleep(1)\n"
            "return sum(numbers)",
            "import time",
        ),
    ),
    Attack(
        "memory of all ranks",
        "2 GB on each rank, below the limit of one",
        MEMORY,
        6,
        {
            "mean": "# answer: mean\nimport time\ndef mean(tensor):\n"
            "    keep = b'x' * (2 << 30)\n    time.sleep(2)\n    dist.all_reduce(tensor)\n"
            "    return tensor / dist.get_world_size()\n"
        },
    ),
    Attack(
        "shared memory",
        "1 GB that children can keep and no process shows",
        "anonymous shared memory is refused",
        6,
        _call(
            "address = map(1 << 30, 0x21)\nlibc.memset(address, 1, 1 << 30)\nreturn sum(numbers)",
            MAP,
        ),
    ),
    Attack(
        "/dev/zero, shared",
        "6 GB that a process wrote and released, and a child keeps",
        "there is no /dev/zero",
        6,
        _call(HIDE.format(flags="0x1", fd='os.open("/dev/zero", os.O_RDWR)'), MAP),
    ),
    Attack(
        "memory of page tables",
        "a byte read in each 2 MB of 2 TB: page tables, no pages",
        "the watchdog counts page tables, or the time limit if it is earlier",
        6,
        _call(
            """
address = map(1 << 44, 0x4022, rights=1)
for page in range(1 << 20):
    ctypes.string_at(address + (page << 21), 1)
return sum(numbers)
""",
            MAP,
        ),
    ),
    Attack(
        "memory of files",
        "/tmp and /dev/shm filled",
        "both have a limited size, and are gone with the process",
        6,
        _call(
            """
for folder in ("/tmp", "/dev/shm"):
    with open(f"{folder}/@MARK@", "wb") as file:
        try:
            while True: file.write(bytes(1 << 20)); file.flush()
        except OSError: pass
""",
        ),
    ),
    Attack(
        "the disk filled",
        "a file of 100 GB in each folder that can be written",
        "everything but /tmp and /dev/shm is read-only",
        6,
        _call(
            """
for folder, folders, files in os.walk("/"):
    try:
        with open(f"{folder}/@MARK@", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 100 << 30)
    except OSError: pass
    if folder.count("/") > 2 or folder == "/proc": folders.clear()
""",
            "import os",
        ),
    ),
    Attack(
        "10 GB of output",
        "the memory and the disk of the grader",
        "64 MiB end the process, 16 KiB are kept",
        6,
        _call("for _ in range(10 << 10): os.write(1, b'x' * (1 << 20))", "import os"),
    ),
    Attack(
        "children that outlive the cell",
        "daemons in process groups of their own that write later",
        NAMESPACE,
        6,
        _call(
            """
for _ in range(8):
    if os.fork() == 0:
        os.setpgid(0, 0)
        if os.fork(): os._exit(0)
        while True:
            time.sleep(1)
            open("/tmp/@MARK@", "a").write("x")
""",
            "import os, time",
        ),
    ),
    Attack(
        "the parent stopped",
        "to let the checks wait",
        NAMESPACE,
        6,
        _call("os.kill(os.getpid(), 19)\nos.kill(-1, 19)", "import os"),
    ),
    Attack(
        "system calls",
        "ptrace, mount, unshare, setns, bpf, io_uring, keyctl and others",
        "system calls that no exercise needs are refused; it has no privileges",
        6,
        _call(
            """
libc = ctypes.CDLL(None)
for number in (101, 165, 166, 272, 308, 310, 311, 321, 425, 319, 29, 250, 298, 323, 155, 161, 105):
    if libc.syscall(number, 0, 0, 0, 0, 0) >= 0: return sum(numbers)
if libc.unshare(0x10000000) == 0: return sum(numbers)
""",
            "import ctypes",
        ),
    ),
    Attack(
        "deaf, stopped and dead children",
        "processes that outlive the check: groups of their own, no signal, nobody who waits",
        NAMESPACE,
        6,
        _call(
            """
for number in range(8):
    if os.fork() == 0:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        if os.fork() and number > 3: os._exit(0)
        if number % 2: os.kill(os.getpid(), signal.SIGSTOP)
        while True: time.sleep(1)
""",
            "import os, signal, time",
        ),
    ),
    Attack(
        "another program in its place",
        "a shell that keeps the socket and says nothing (exec)",
        TIME,
        6,
        _call(
            """
for fd in range(3, 64):
    try: os.set_inheritable(fd, True)
    except OSError: pass
os.execv("/bin/sh", ["sh", "-c", "trap '' 1 2 3 15; while :; do sleep 1; done"])
""",
            "import os",
        ),
    ),
    Attack(
        "exit within C",
        "an end with code 0, past Python (exit(3) and its handlers)",
        "the end of its process is a verdict",
        6,
        _call("ctypes.CDLL(None).exit(0)", "import ctypes"),
    ),
    Attack(
        "a core dump",
        "its memory in a file of the machine",
        "the limit of core files is 0, and cannot be raised",
        6,
        _call(
            """
try: resource.setrlimit(resource.RLIMIT_CORE, (1 << 26, 1 << 26))
except ValueError: pass
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
if not (pid := os.fork()): os.abort()
if os.WCOREDUMP(os.waitpid(pid, 0)[1]): return sum(numbers)
""",
            "import ctypes, os, resource",
        ),
    ),
    Attack(
        "rights taken back",
        "root's number and capabilities",
        "the process has no capability, and its user namespace no other user",
        6,
        _call(
            """
header = struct.pack("Ii", 0x20080522, 0)
if ctypes.CDLL(None).capset(header, bytes([255] * 24)) == 0: return sum(numbers)
for take in (os.setuid, os.setgid, lambda root: os.setgroups([root]), os.chroot):
    try:
        take("/tmp" if take is os.chroot else 0)
        return sum(numbers)
    except OSError: pass
""",
            "import ctypes, os, struct",
        ),
    ),
    Attack(
        "limits raised",
        "more processes, open files and bytes in a file (setrlimit)",
        "the hard limits are the limits",
        6,
        _call(
            """
for name in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
    _, most = resource.getrlimit(name)
    try:
        resource.setrlimit(name, (most + 1, most + 1))
        return sum(numbers)
    except ValueError: pass
""",
            "import resource",
        ),
    ),
    Attack(
        "empty files in each folder",
        "memory of the kernel, where nobody counts files",
        "each folder that can be written has a limit of files",
        6,
        _call("""
count = 0
for folder in ("/tmp", "/dev/shm", "/dev/pts", "/proc", "/dev", "/"):
    try:
        for _ in range(20_000):
            open(f"{folder}/@MARK@-{count}", "w").close()
            count += 1
    except OSError: pass
if count > 40_000: return sum(numbers)
"""),
    ),
    Attack(
        "files without a name",
        "memory of files that are removed and stay open",
        "the size of a folder counts them",
        6,
        _call(
            """
size, files = 0, []
for folder in ("/tmp", "/dev/shm", "/dev/pts", "/proc") * 3:
    try:
        files.append(open(f"{folder}/@MARK@", "wb", buffering=0))
        os.remove(files[-1].name)
        while size < 200 << 20: size += files[-1].write(bytes(1 << 20))
    except OSError: pass
if size >= 200 << 20: return sum(numbers)
""",
            "import os",
        ),
    ),
    Attack(
        "one core for all its processes",
        "to be late by waiting for a core, again and again",
        "what waited for a core runs once more, alone, and then counts",
        6,
        _call(
            """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(20):
    if os.fork() == 0: break
while True: pass
""",
            "import os",
        ),
    ),
]
