"""What students handed in: a folder of notebooks, nbgrader's tree, or a zip of a platform."""

from dataclasses import dataclass, field


@dataclass
class Submission:
    """One student's file.

    student    the key of the gradebook
    file       its name, relative to what was given
    data       its bytes, at most transplant.MAX_BYTES + 1
    submitted  when, in ISO 8601 with the time zone; "" if nothing says so
    problem    why it cannot be read; "" if it can
    notes      what is to be said about it: an older one was left out, say
    """

    student: str
    file: str
    data: bytes = b""
    submitted: str = ""
    problem: str = ""
    notes: list[str] = field(default_factory=list)
