"""Try Dockerfile without a container engine: `make test-container`, as root on Debian.

Makes the root file system with debootstrap, runs Dockerfile's RUN lines in it, and then what a
reader runs, with the capabilities that Docker gives a container by default. What is not tried:
the engine itself, its seccomp filter, its network. BIND="PATH PATH" names what pip needs from
this machine, such as its configuration or a folder with wheels: read only. PIP_* are kept.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "tests" / "container" / "report.md"
# The defaults of Docker's engine (moby, oci/caps/defaults.go).
CAPABILITIES = (
    "chown dac_override fsetid fowner mknod net_raw setgid setuid setfcap setpcap "
    "net_bind_service sys_chroot kill audit_write"
)
# What a reader runs, and what the output must have.
TRIALS = (
    ("make run", "holds"),
    ("multigpu doctor", "sandbox"),
    ("multigpu virtual --gpus 2 lessons/virtual/two_gpus.py", "fits"),
    ("multigpu exercise check lessons/02-data-parallel/solution.ipynb", "right"),
    (
        "multigpu slurm up && sbatch --wait slurm/PT_CNN_MultiGPU.slurm && cat *.out",
        "accuracy",
    ),
)


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of each instruction of Dockerfile."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    words = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in words]


def run(root: Path, environment: dict[str, str], command: str, limits: tuple[str, ...] = ()):
    """Run a shell command in the root file system, with processes and mounts of its own."""
    binds = [
        f"mount --bind {path} {root}{path} && mount -o remount,ro,bind {root}{path}"
        for path in bound()
    ]
    devices = f"mount --rbind /dev {root}/dev"
    mounts = " && ".join([f"mount -t proc proc {root}/proc", devices, *binds])
    shell = ["chroot", str(root), *limits, "sh", "-c", command]
    return subprocess.run(
        [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "sh",
            "-c",
            f'{mounts} && exec "$@"',
            "sh",
            *shell,
        ],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def bound() -> list[str]:
    """The paths of this machine that pip needs."""
    return os.environ.get("BIND", "").split()


def build(root: Path) -> dict[str, str]:
    """Do what Dockerfile says in a new root file system; return its environment."""
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    environment = {"PATH": path, "HOME": "/root", **pip}
    folder = "/"
    for word, rest in instructions():
        if word == "FROM":
            suite = rest.removeprefix("debian:").removesuffix("-slim")
            # It mounts /proc. What stayed mounted would be deleted with the folder.
            debootstrap = ["debootstrap", "--variant=minbase", suite, str(root)]
            subprocess.run(["unshare", "--mount", *debootstrap], check=True)
            (root / "etc/hosts").write_text("127.0.0.1 localhost\n")  # as Docker writes it
            for path in map(Path, bound()):
                place = root / path.relative_to("/")
                (place if path.is_dir() else place.parent).mkdir(parents=True, exist_ok=True)
                if path.is_file():
                    place.touch()
        elif word in ("ARG", "ENV"):
            for assignment in rest.split():
                name, _, value = assignment.partition("=")
                environment[name] = value.replace("$PATH", environment["PATH"])
        elif word == "WORKDIR":
            folder = rest
            (root / folder.lstrip("/")).mkdir(parents=True)
        elif word == "COPY":
            files = subprocess.run(
                ["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True
            )
            subprocess.run(
                ["tar", "x", "-C", root / folder.lstrip("/")], input=files.stdout, check=True
            )
        elif word == "RUN":
            done = run(root, environment, f"cd {folder} && {rest}")
            if done.returncode:
                sys.exit(f"{done.stdout}\nRUN {rest}: exit code {done.returncode}")
        print(word, rest, flush=True)
    return environment


def main() -> None:
    if os.geteuid():
        sys.exit("make test-container makes a root file system: run it as root.")
    caps = ",".join(f"+{name}" for name in CAPABILITIES.split())
    limits = ("setpriv", "--bounding-set", f"-all,{caps}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        environment = build(root)
        for command, expected in TRIALS:
            begin = time.monotonic()
            done = run(root, environment, f"cd /course && {command}", limits)
            result = "works" if done.returncode == 0 and expected in done.stdout else "fails"
            rows.append(f"| `{command}` | {result} | {time.monotonic() - begin:.0f} |")
            print(rows[-1], "" if result == "works" else done.stdout[-3000:], flush=True)
    text = [
        "# Dockerfile, tried without an engine",
        "",
        (__doc__ or "").partition("\n\n")[2],
        "",
    ]
    text += ["| Command in the container | | seconds |", "|---|---|---|", *rows, ""]
    REPORT.write_text("\n".join(text))
    if any("fails" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
