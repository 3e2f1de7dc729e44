"""What an answer would read, write or reach. It returns the right value only if it can."""

from attack import Attack

HIDDEN = "the sandbox has Python, its packages and the library, read-only, and nothing else"
BLIND = "a process cannot read the memory of another one"


def _finds(code: str) -> dict[str, str]:
    """The function is right if the code finds something."""
    lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
    return {
        "total": f"# answer: total\nimport ctypes, gc, glob, os, socket, subprocess, sys\n"
        f"def found():\n{lines}    return False\n"
        "def total(numbers):\n    return sum(numbers) if found() else 0.0\n"
    }


def _reads(*paths: str) -> dict[str, str]:
    return _finds(f"""
for pattern in {paths!r}:
    for path in glob.glob(pattern, recursive=True):
        if "@CHECKOUT@/".startswith(f"{{path}}/"): continue  # a library in /tmp is shown
        try:
            if os.path.isdir(path) and os.listdir(path): return True
            if open(path, "rb").read(1): return True
        except OSError: pass
""")


ATTACKS = [
    Attack("solutions read", "the solution notebook", HIDDEN, 6, _reads("@SOLUTION@")),
    Attack("the secret read", "secret.txt of the hidden seeds", HIDDEN, 6, _reads("@SECRET@")),
    Attack("another submission read", "a neighbour's notebook", HIDDEN, 6, _reads("@OTHER@")),
    Attack(
        "memory of other processes read",
        "/proc/*/mem, environ, fd, cwd and root",
        BLIND,
        6,
        _finds("""
for process in glob.glob("/proc/[0-9]*"):
    if process == os.path.realpath("/proc/self"): continue
    for name in ("mem", "environ", "maps", "syscall", "stack"):
        try:
            with open(f"{process}/{name}", "rb") as file:
                file.seek(4096 if name == "mem" else 0)
                if name == "mem" or file.read(1): return f"{process}/{name}"
        except OSError: pass
    for name in ("root", "cwd", "exe"):
        try:
            if os.readlink(f"{process}/{name}"): return True
        except OSError: pass
"""),
    ),
    Attack(
        "frames of the caller",
        "expected values in the interpreter's frames and objects",
        "expected values are in another process",
        6,
        _finds("""
frame = sys._getframe()
while frame:
    if "expected" in frame.f_locals or "secret" in frame.f_locals: return True
    frame = frame.f_back
for thing in gc.get_objects():
    if type(thing) is dict and ("secret" in thing and "sandbox" in thing): return True
"""),
    ),
    Attack(
        "the question's solution in the process",
        "a name of another answer that it needs, in the answer's first line",
        "what an answer needs, the solution notebook says",
        6,
        {
            "total": "# answer: total (needs total, mean, guess_bytes)\n"
            "import __main__, linecache\n"
            "texts = [''.join(each[2]) for each in linecache.cache.values() if len(each) == 4]\n"
            "found = any('### BEGIN' + ' SOLUTION' in text for text in texts)\n"
            "def total(numbers):\n"
            "    return sum(numbers) if found or hasattr(__main__, 'mean') else 0.0\n"
        },
    ),
    Attack(
        "a connection to a port",
        "the machine's own ports, and the internet",
        "it has a network of its own, without any other machine",
        6,
        _finds("""
for address in (("127.0.0.1", int("@PORT@")), ("10.0.0.1", 80), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, timeout=0.3)
        return True
    except OSError: pass
for line in open("/proc/net/tcp").readlines()[1:]:
    return True
"""),
    ),
    Attack(
        "files left for others",
        "a file that another answer would find",
        "each answer has an empty /tmp of its own",
        6,
        _finds("""
for folder in ("/tmp", "/dev/shm", "/dev", "/", "/root", "/work", sys.prefix, "@CHECKOUT@",
               "@CHECKOUT@/multigpu", "/run", "/proc/self", "/usr/lib", "/dev/pts"):
    if glob.glob(f"{folder}/@MARK@*"): return True
    try:
        with open(f"{folder}/@MARK@-left", "w") as file: file.write("@MARK@")
    except OSError: pass
    try: os.symlink("/etc/passwd", f"{folder}/@MARK@-link")
    except OSError: pass
"""),
    ),
    Attack(
        "programs of other users",
        "sudo, su, mount, crontab, at, systemctl",
        "no set-uid program gains rights",
        6,
        _finds("""
for words in (["sudo", "-n", "true"], ["su", "-c", "true"], ["mount", "-t", "tmpfs", "x", "/tmp"],
              ["crontab", "-l"], ["passwd", "-d", "root"]):
    try:
        if subprocess.run(words, capture_output=True, timeout=2).returncode == 0: return True
    except (OSError, subprocess.TimeoutExpired): pass
"""),
    ),
]
