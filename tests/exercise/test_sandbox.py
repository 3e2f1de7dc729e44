"""A student's process in the sandbox: what it may use, what it sees, and how it ends."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import multigpu
from multigpu.exercise import seccomp
from multigpu.exercise.session import Limits, Session, StudentError
from multigpu.exercise.worker import Worker
from multigpu.launch import sandbox

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sandbox.probe().works, reason=sandbox.probe().problem),
]
LIMITS = Limits(memory=600 << 20, disk=4 << 20, processes=20, flood=4 << 20)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(sandbox.probe().program, LIMITS)
    yield worker
    worker.close()


@pytest.fixture
def session(worker) -> Iterator[Session]:
    session = worker.session()
    yield session
    session.close()


def call(session: Session, body: str, *arguments):
    """What the body of a student's function `f(x)` returns."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    session.run("answer", f"import os\ndef f(x=None):\n{lines}")
    return session.call("f", arguments, {})


def test_a_function_is_called_with_plain_data(session):
    got = call(session, "return {'twice': 2 * x, 'rank': (1, None)}", torch.ones(2))

    assert torch.equal(got["twice"], torch.full((2,), 2.0))
    assert got["rank"] == (1, None)


def test_an_error_has_its_type_text_and_line(session):
    with pytest.raises(StudentError, match="ValueError: no") as caught:
        call(session, "raise ValueError('no')")

    assert caught.value.kind == "ValueError"
    assert caught.value.lines == ["answer, line 3: raise ValueError('no')"]


def test_a_syntax_error_names_its_line(session):
    with pytest.raises(StudentError) as caught:
        session.run("answer", "x = 1\ny = = 2")

    assert caught.value.kind == "SyntaxError"
    assert "line 2" in caught.value.lines[-1]


def test_what_it_prints_is_kept_and_cut(worker):
    session = worker.session()
    call(session, "print('a' * 100_000); os.write(2, b'error')")
    session.close()

    assert len(session.printed) == LIMITS.output
    assert set(session.printed) == {ord("a")}


def test_it_sees_neither_files_nor_processes_of_others(worker, session, tmp_path):
    (tmp_path / "secret").write_text("secret")
    other = worker.session()
    other.run("answer", "open('/tmp/of the other', 'w').write('x')")

    home, secret, temporary, signalled = call(
        session,
        "import pathlib\n"
        "def can_kill(pid):\n"
        "    try: os.kill(pid, 0)\n"
        "    except OSError: return False\n"
        "    return True\n"
        "home = [str(p) for p in pathlib.Path('/').glob('home/*')]\n"
        "pids = [pid for pid in range(1, 400) if can_kill(pid)]\n"
        "return [home, os.path.exists(x), os.listdir('/tmp'), pids]",
        str(tmp_path / "secret"),
    )

    assert home == []
    assert secret is False
    in_tmp = [path for path in sandbox.shown() if path.is_relative_to("/tmp")]
    assert set(temporary) == {path.parts[2] for path in in_tmp}
    threads = call(session, "import threading\nreturn threading.active_count()")
    assert len(signalled) == threads, "a thread has a number as a process has"
    other.close()


FROM_TMP = """
from multigpu.launch import sandbox
from multigpu.exercise.worker import Worker

worker = Worker(sandbox.probe().program)
session = worker.session()
session.run("answer", "import os, multigpu.virtual.control")
session.run("answer", "found = [multigpu.__file__, os.access(multigpu.__file__, os.W_OK)]")
print(session.value("found"))
worker.close()
"""


def test_a_library_in_tmp_can_still_be_imported():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        package = Path(multigpu.__file__).parent
        shutil.copytree(package, Path(folder, "multigpu"))
        done = subprocess.run(
            [sys.executable, "-c", FROM_TMP],
            env=os.environ | {"PYTHONPATH": folder},
            cwd=folder,
            capture_output=True,
            text=True,
        )
    assert done.stdout.strip() == f"['{folder}/multigpu/__init__.py', False]", done.stderr


def test_it_is_an_ordinary_user_without_network(session):
    assert call(session, "return os.getuid()") != 0
    interfaces = call(session, "import socket\nreturn socket.if_nameindex()")
    assert [name for _, name in interfaces] == ["lo"]


@pytest.mark.parametrize(
    "body",
    [
        "return os.memfd_create('x')",
        "import mmap\nmmap.mmap(-1, 1 << 20)",
        "import mmap\nmmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20, mmap.MAP_SHARED)",
        "import socket\nsocket.socket(40, 1)  # vsock",
        "os.openpty()",
        "open('/new', 'w')",
        "open('/dev/new', 'w')",
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
        "import ctypes\nif ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) < 0: raise OSError",
        "import ctypes\nif ctypes.CDLL(None).ptrace(0, 0, 0, 0): raise OSError",
        "open('/usr/new', 'w')",
        "open(os.path.__file__, 'a')",
        "os.setuid(0)",
        "import errno\npid = os.fork()\nif pid == 0:\n"
        "    try: os.setsid()\n    except OSError as error: os._exit(error.errno)\n"
        "    os._exit(0)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "if code: raise OSError(code, 'setsid')",
        "import fcntl\nfcntl.lockf(open(os.path.__file__), fcntl.LOCK_SH)",
        "import fcntl\nfcntl.flock(open(os.path.__file__), fcntl.LOCK_SH)",
        "import fcntl\nfcntl.fcntl(open('/tmp/x', 'w'), fcntl.F_SETLEASE, fcntl.F_WRLCK)",
        "import fcntl\nfcntl.fcntl(os.open('/tmp', os.O_RDONLY), fcntl.F_NOTIFY, 2)",
        "import fcntl\nfcntl.fcntl(os.pipe()[0], 1031, 1 << 20)  # F_SETPIPE_SZ",
        "import socket\nsocket.socket().setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 9)",
        "import ctypes\nif ctypes.CDLL(None).inotify_init1(0) < 0: raise OSError",
        "import ctypes\nif ctypes.CDLL(None).vmsplice(1, None, 0, 0): raise OSError",
        "import ctypes\nif ctypes.CDLL(None).sysinfo(bytes(160)): raise OSError",
        "import ctypes\nif ctypes.CDLL(None).mq_open(b'/x', 66, 384, None) < 0: raise OSError",
        "for n in range(3): open(f'/proc/{n}', 'w')",
        "a, b = os.pipe()\nos.splice(a, b, 1, flags=2)",
        "os.mount('x', '/tmp', 'tmpfs') if hasattr(os, 'mount') else os.chroot('/tmp')",
    ],
)
def test_what_it_may_not_do(session, body):
    with pytest.raises(StudentError) as caught:
        call(session, body)

    assert caught.value.kind in ("OSError", "PermissionError", "FileNotFoundError")


def test_threads_and_children_work_under_the_filter(session):
    got = call(
        session,
        "import subprocess, threading\n"
        "done = []\n"
        "thread = threading.Thread(target=lambda: done.append(1))\n"
        "thread.start(); thread.join()\n"
        "return [done, subprocess.run(['echo', 'x'], capture_output=True, text=True).stdout]",
    )

    assert got == [[1], "x\n"]


def test_without_a_filter_there_is_no_sandbox():
    with pytest.raises(OSError, match="riscv64"):
        seccomp.program("riscv64")
    for machine in seccomp.ARCHITECTURES:
        assert seccomp.program(machine)


def test_the_disk_is_limited(session):
    with pytest.raises(StudentError, match=r"No space left|too large"):
        call(
            session,
            "for n in range(10):\n    open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))",
        )


def test_the_number_of_files_is_limited(session):
    with pytest.raises(StudentError, match="No space left"):
        call(session, "for n in range(100_000): open(f'/tmp/{n}', 'w').close()")


def test_the_sessions_of_a_check_have_one_limit_of_memory(worker):
    sessions = [worker.session() for _ in range(3)]
    found = []
    for each in sessions:
        try:
            call(each, "global keep\nkeep = b'x' * (250 << 20)")
        except StudentError as error:
            found.append(error.kind)
    deadline = time.monotonic() + 10
    while not found and time.monotonic() < deadline:
        time.sleep(0.1)
        found = [each.stopped[0] for each in sessions if each.stopped]
    for each in sessions:
        each.close()

    assert "Memory" in found


def test_what_it_reads_of_the_machine_does_not_change(worker, session):
    before = call(session, "return open('/proc/meminfo').read()")
    body = (
        "open('/dev/shm/x', 'wb').write(bytes(1 << 19))\nreturn open('/proc/meminfo').read()"
    )

    assert "MemTotal" in before
    assert call(session, body) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give each worker a user")
def test_as_root_each_worker_has_a_user_of_its_own(worker, session):
    other = Worker(sandbox.probe().program)
    theirs = other.session()
    users = [call(each, "return os.getuid()") for each in (session, theirs)]
    theirs.close()
    other.close()

    assert len({*users, 0}) == 3


def test_it_sees_no_other_process(worker, session):
    other = worker.session()
    call(other, "return 0")
    body = "return [name for name in os.listdir('/proc') if name.isdigit()]"

    names = call(session, body)

    other.close()
    assert names == []


ONE_CORE = "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
SPIN = "while True: pass"


@pytest.mark.parametrize(
    ("body", "beside", "starved"),
    [
        ("import time\ntime.sleep(60)", False, False),
        (ONE_CORE + SPIN, True, True),
    ],
)
def test_a_timeout_says_whether_it_waited_for_a_core(worker, body, beside, starved):
    neighbours = [worker.session(seconds=5) for _ in range(4 * beside)]
    sessions = [*neighbours, worker.session(seconds=4)]

    def late(session) -> None:
        with pytest.raises(StudentError, match="Timeout"):
            call(session, ONE_CORE + SPIN if session in neighbours else body)

    threads = [threading.Thread(target=late, args=(each,)) for each in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session in sessions:
        session.close()
    assert sessions[-1].starved is starved


def test_a_process_that_waits_for_its_own_children_has_not_waited_for_a_core(monkeypatch):
    """The parent waited for 18 of 20 s, but all of them together ran for 20 s or more."""
    for ran, starved in ((12.0, True), (20.0, False), (38.0, False)):
        monkeypatch.setattr(
            "multigpu.exercise.session.core_seconds", lambda _, r=ran: (r, 18.0)
        )
        session = Session(Limits(), 20, socket.socketpair()[0])
        session._late(20)
        assert session.starved is starved


def test_the_number_of_processes_is_limited(session):
    number = call(
        session,
        "import time\n"
        "n = 0\n"
        "try:\n"
        "    while n < 100:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(60)\n"
        "        n += 1\n"
        "except OSError:\n"
        "    return n",
    )

    assert number is not None and number < LIMITS.processes


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("x = []\nwhile True: x.append(bytes(1 << 24))", "Memory"),
        (
            "import time\n"
            "for _ in range(8):\n"
            "    if os.fork() == 0:\n"
            "        x = os.urandom(1 << 20) * 150\n"
            "        time.sleep(60)\n"
            "time.sleep(60)",
            "Memory",
        ),
        (
            "import ctypes, mmap\n"
            "m = mmap.mmap(-1, 1 << 42, flags=0x4022)  # private, anonymous, not reserved\n"
            "for page in range(1 << 21): m[page << 21]  # a page table each, and no page",
            "Memory",
        ),
        ("while True: print('x' * 100_000)", "Output"),
        ("os._exit(0)", "Died"),
        ("import ctypes\nctypes.string_at(0)", "Died"),
        ("return object()", "NotPlain"),
    ],
)
def test_a_session_that_ends_says_the_cause(session, body, kind):
    with pytest.raises(StudentError) as caught:
        call(session, body)

    assert caught.value.kind == kind


def test_a_loop_that_ignores_signals_ends_with_all_its_children(worker):
    session = worker.session(seconds=2)

    with pytest.raises(StudentError) as caught:
        call(
            session,
            "import signal, time\n"
            "for number in (2, 15): signal.signal(number, signal.SIG_IGN)\n"
            "if os.fork() == 0: os.setpgid(0, 0)\n"
            "while True: pass",
        )

    session.close()
    assert caught.value.kind == "Timeout"
    assert wait_for_end(session.pid)


def test_a_child_that_outlives_the_call_ends_with_the_session(worker):
    session = worker.session()
    call(session, "import time\nif os.fork() == 0:\n    os.setpgid(0, 0)\n    time.sleep(600)")
    assert psutil.Process(session.pid).children(recursive=True)

    session.close()

    assert wait_for_end(session.pid)


def wait_for_end(pid: int) -> bool:
    """Whether the process, and so its namespace, ends within seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_the_worker_ends_with_its_sessions(worker):
    """The last test of the file: it ends the process that all tests share."""
    session = worker.session()
    call(session, "import time\nif os.fork() == 0: time.sleep(600)")

    worker.close()

    assert wait_for_end(session.pid)
    assert worker.ended
