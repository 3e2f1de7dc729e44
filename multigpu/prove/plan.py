"""Which commands a proof runs: the program's own, and the same with one rank or one GPU."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multigpu.errors import UserError
from multigpu.virtual.command import TORCHRUN, command_line, real_gpus

# The flags with which launchers take the number of processes, by the launcher's name.
PROCESSES = {
    **dict.fromkeys(TORCHRUN, ("--nproc-per-node", "--nproc_per_node")),
    "accelerate": ("--num_processes", "--num-processes"),
    "accelerate.commands.launch": ("--num_processes", "--num-processes"),
    "horovodrun": ("-np", "--num-proc"),
    "mpirun": ("-np", "-n", "--np"),
    "mpiexec": ("-np", "-n"),
    "srun": ("-n", "--ntasks"),
    "deepspeed": ("--num_gpus",),
    "fabric": ("--devices",),
}
# A program's own flags that give a number of ranks or devices, as Lightning's command line
# (--trainer.devices) and Hydra (trainer.devices=2) have them, too.
OWN_FLAGS = re.compile(
    r"(--(\w+\.)*|(\w+\.)+)"
    r"(spawn|devices|gpus|num[-_]gpus|n[-_]gpus|nprocs?|num[-_]processes|num[-_]procs?"
    r"|world[-_]size|ranks|num[-_]ranks|num[-_]devices|nproc[-_]per[-_]node|workers[-_]ddp)"
)
# What asks for GPUs, and libraries that take GPUs by themselves.
SAYS_CUDA = re.compile(
    r"cuda|nccl|torch\.accelerator|accelerator\s*=\s*[\"']gpu|\bgpus\s*="
    r"|^\s*(from|import)\s+(accelerate|transformers|lightning|pytorch_lightning)\b",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class Plan:
    """What is run.

    command     the words of the parallel run
    reference   the words of the reference; None if nothing could be replaced in `command`
    ranks       the ranks that the launcher starts; None if the program starts them itself
    gpus        the number of virtual GPUs; None: the CPU, or this machine's own GPUs
    real        whether the runs use this machine's GPUs
    against     the number of ranks of the reference
    reference_given   whether --reference gave the reference
    words       the command as it was given
    """

    command: list[str]
    reference: list[str] | None
    ranks: int | None
    gpus: int | None
    real: bool
    reference_given: bool = False
    against: int = 1
    words: tuple[str, ...] = ()

    @property
    def may_have_ranks(self) -> bool:
        """Whether the reference can have several ranks that meet at a port of their own."""
        return self.reference_given or self.against > 1 or self.ranks is None


def make(
    words: Sequence[str],
    gpus: int | None = None,
    reference: str | None = None,
    against: int | None = None,
    alone: bool = False,
) -> Plan:
    """The plan for a command. Raises UserError for what cannot be compared."""
    words = list(words)
    script = next((word for word in words if word.endswith(".py")), None)
    # After -m, or a flag that does not exist, the first .py is no script of this command.
    flag = any(word.startswith("-") for word in [*words[:1], script or ""])
    if script and not flag and not Path(script).exists():
        raise UserError(f"there is no script {script}: give the path of one.")
    launched = _processes(words)
    ranks = int(launched.value) if launched and launched.value.isdigit() else None
    if gpus is not None and not 1 <= gpus <= 128:
        raise UserError(f"--gpus is {gpus}: give a number from 1 to 128.")
    if launched and not launched.value.isdigit():
        ranks = gpus or real_gpus() or 2
        words = launched.replaced(ranks)
    if launched and launched.missing and not alone:
        raise UserError(
            f"{launched.name} starts one process, unless you say how many: give "
            f"{launched.flags[0]}, as in `{launched.example()}`."
        )
    if against is not None and not 1 <= against < (ranks or against + 1):
        raise UserError(
            f"--against is {against}: give a number of ranks below the command's own, which "
            f"starts {ranks}."
        )
    if against is not None and (launched is None or reference is not None):
        raise UserError(
            "--against replaces a launcher's number of processes: give it with torchrun or "
            "another launcher, and without --reference."
        )
    # A machine with fewer GPUs than ranks is like one without: NCCL refuses ranks that share
    # a GPU, and a program that starts no ranks would use one GPU in both runs.
    real = real_gpus() >= (ranks or 2) and gpus is None
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    virtual = gpus is not None or (not real and not hidden and says_cuda(words))
    if virtual and gpus is not None and ranks is not None and ranks > gpus:
        raise UserError(
            f"the command starts {ranks} ranks, and --gpus is {gpus}: give --gpus {ranks}, "
            "because each rank needs a GPU of its own."
        )
    if ranks is not None and ranks < 2 and not alone:
        raise UserError(
            "the command starts one rank, and a proof compares several with one: give "
            f"{launched.flags[0]}=2 or more."
        )
    number = gpus or ranks or 2
    return Plan(
        command=command_line(words),
        reference=(
            command_line(shlex.split(reference))
            if reference
            else command_line(launched.replaced(against or 1) if launched else words)
        ),
        ranks=ranks,
        gpus=number if virtual else None,
        real=real,
        reference_given=reference is not None,
        against=against or 1,
        words=tuple(words),
    )


def with_one(words: Sequence[str]) -> list[str] | None:
    """The command with its own flags for ranks or devices set to 1; None if it has none."""
    changed, previous = False, ""
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), 0)
    result = list(words[:script])
    for word in words[script:]:
        flag, equals, value = word.partition("=")
        if OWN_FLAGS.fullmatch(flag) and equals and value.isdigit():
            word, changed = f"{flag}=1", changed or value != "1"
        elif OWN_FLAGS.fullmatch(previous) and word.isdigit():
            word, changed = "1", changed or word != "1"
        result.append(word)
        previous = word
    return result if changed else None


def with_batch_times(words: Sequence[str], times: float) -> list[str] | None:
    """The command with its flag for the batch size multiplied; None without such a flag."""
    flags = re.compile(
        r"((?:--?|(?=\w+\.))(?:\w+[-_.])*batch[-_]?size(?:[-_]\w+)*|--batch|-b|--bs)"
    )
    result = list(words)
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flags.fullmatch(flag) and equals and value.isdigit():
            result[place] = f"{flag}={round(int(value) * times)}"
            return result
        following = words[place + 1] if place + 1 < len(words) else ""
        if flags.fullmatch(word) and following.isdigit():
            result[place + 1] = str(round(int(following) * times))
            return result
    return None


def says_cuda(words: Sequence[str]) -> bool:
    """Whether the command, the program's file or a module beside it asks for GPUs."""
    if any(re.fullmatch(r"(.*=)?(gpu|cuda(:\d+)?|nccl)", word) for word in words):
        return True
    script = next((Path(word) for word in words if word.endswith(".py")), None)
    if script is None and "-m" in words[:-1]:
        name = next(iter(list(words)[list(words).index("-m") + 1 :]), "")
        script = Path(*name.split(".")).with_suffix(".py")
    if script is None or not script.is_file():
        return any(SAYS_CUDA.search(word) for word in words)
    texts = [script.read_text(errors="replace")]
    for name in re.findall(r"^\s*(?:from|import)\s+([\w.]+)", texts[0], re.MULTILINE):
        beside = script.parent / Path(*name.split(".")).with_suffix(".py")
        if beside.is_file():
            texts.append(beside.read_text(errors="replace"))
    return any(SAYS_CUDA.search(text) for text in texts)


@dataclass(frozen=True)
class _Launcher:
    """A launcher in a command, and where its number of processes is.

    place is the word with the flag and the number, or the number itself; None if the flag is
    not there.
    """

    words: list[str]
    name: str
    flags: tuple[str, ...]
    at: int
    place: int | None
    value: str

    @property
    def missing(self) -> bool:
        return self.place is None

    def replaced(self, number: int) -> list[str]:
        """The command with `number` processes."""
        words = list(self.words)
        if self.place is None:
            words.insert(self.at + 1, f"{self.flags[0]}={number}")
        elif "=" in words[self.place]:
            words[self.place] = f"{words[self.place].partition('=')[0]}={number}"
        else:
            words[self.place] = str(number)
        return words

    def example(self) -> str:
        return shlex.join(self.replaced(2))


def _processes(words: Sequence[str]) -> _Launcher | None:
    """The launcher of a command; None if it starts none."""
    for at, word in enumerate(words):
        if word.endswith(".py"):
            return None
        name = Path(word).name
        if name not in PROCESSES:
            continue
        flags = PROCESSES[name]
        for place in range(at + 1, len(words)):
            flag, equals, value = words[place].partition("=")
            if flag in flags and equals:
                return _Launcher(list(words), name, flags, at, place, value)
            if words[place] in flags and place + 1 < len(words):
                return _Launcher(list(words), name, flags, at, place + 1, words[place + 1])
            if words[place].endswith(".py"):
                break
        return _Launcher(list(words), name, flags, at, None, "1")
    return None
