"""Faults that are planted into right programs, and what `multigpu prove` must say of each.

The programs of programs/ and right/ compute the same with one rank and with several. A fault
changes lines of one of them. faults.txt has the faults, one after the other:

    === NAME: CAUSE in PROGRAM, FIELD=VALUE
    # what a reader has to know
      a line that stays
    - lines of the program
    + lines in their place
    @@
    - lines of another place, further down

`multigpu prove` must name CAUSE. If the change leaves the program right, CAUSE is "holds".
FIELD is a field of Fault. After the place before it, the old lines of a place occur once.
"""

from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
RIGHT_PROGRAMS = Path(__file__).parent / "right"
# Without --local-addr, --standalone hangs if the machine's name does not resolve.
TORCHRUN = ("torchrun", "--standalone", "--local-addr=127.0.0.1")


@dataclass(frozen=True)
class Fault:
    """What is planted, and what must be found.

    program    the file in programs/ or right/, without its suffix
    changes    the lines of each place, with their "- ", "+ " or, if they stay, two spaces
    kind       the cause that must be named; "holds" if nothing must be found
    rank       the rank that differs from the others, or from what one rank computes
    parameter  the first parameter, or the buffer, that is wrong, if not all are
    step       the first optimizer step before whose update something is wrong, where it is
               not the first: rows, weights, gradients, the optimizer's options or its state;
               for a hang, the step that did not come. The first step is 1
    ranks      how many ranks the parallel run has
    exit       prove's exit code: 0 holds, 1 fails, 2 nothing can be said
    """

    name: str
    kind: str
    program: str
    changes: list[list[str]] = field(default_factory=list)
    rank: int | None = None
    parameter: str | None = None
    step: int | None = None
    ranks: int = 2
    exit: int = 1

    def source(self) -> str:
        """The program with the fault in it."""
        folder = PROGRAMS if (PROGRAMS / f"{self.program}.py").exists() else RIGHT_PROGRAMS
        made, rest = [], (folder / f"{self.program}.py").read_text().splitlines()
        for change in self.changes:
            old = [line[2:] for line in change if not line.startswith("+")]
            new = [line[2:] for line in change if not line.startswith("-")]
            size = len(old)
            places = [at for at in range(len(rest)) if rest[at : at + size] == old]
            assert len(places) == 1, f"{self.name}: {len(places)} times in the program: {old}"
            made += rest[: places[0]] + new
            rest = rest[places[0] + size :]
        return "\n".join([*made, *rest]) + "\n"


def _read(record: str) -> Fault:
    """The fault of one record of faults.txt."""
    head, *lines = record.rstrip().split("\n")
    name, _, head = head.partition(": ")
    what, *fields = head.split(", ")
    kind, _, program = what.partition(" in ")
    values: dict = {"exit": 0} if kind == "holds" else {}
    for each in fields:
        key, _, value = each.partition("=")
        values[key] = value if key == "parameter" else int(value)
    text = "\n".join(line for line in lines if not line.startswith("#")).rstrip()
    changes = [change.split("\n") for change in text.split("\n@@\n")] if text else []
    return Fault(name, kind, program, changes, **values)


TEXT = (Path(__file__).parent / "faults.txt").read_text(encoding="utf-8")
FAULTS = [
    *(_read(record) for record in TEXT.split("\n=== ")[1:]),
    *(Fault(p.stem, "holds", p.stem, exit=0) for p in sorted(PROGRAMS.glob("*.py"))),
]
