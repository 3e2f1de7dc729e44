"""Pseudonyms in all reports: `--pseudonyms`. A file of its own maps them back to students."""

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import replace

from multigpu.errors import UserError
from multigpu.grading.csv_cells import table
from multigpu.grading.results import Result

# Without the letters and digits that look alike, as in Crockford's base 32.
ALPHABET = bytes.maketrans(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", b"0123456789abcdefghjkmnpqrstvwxyz"
)
MIN_SECRET = 16
# What a note can name: the file that was handed in, or one that was left out.
FILE_NAME = re.compile(r"[^,:;]*\.ipynb\b( \(upload \d+\))?", re.IGNORECASE)


def pseudonym(student: str, secret: bytes) -> str:
    """A name that stays the same for a secret: the first 50 bits of an HMAC-SHA256.

    Without the secret, it cannot be computed from a list of students. Raises UserError for a
    secret of less than 16 bytes, which could be guessed.
    """
    if len(secret) < MIN_SECRET:
        raise UserError(
            f"the secret for pseudonyms has {len(secret)} bytes: give at least {MIN_SECRET}."
        )
    digest = hmac.new(secret, b"student:" + student.encode("utf-8", "replace"), hashlib.sha256)
    letters = base64.b32encode(digest.digest()).translate(ALPHABET).decode()
    return f"student-{letters[:10]}"


def pseudonymized(results: Iterable[Result], secret: bytes) -> list[Result]:
    """The results without the students' keys, in the order of the pseudonyms.

    File names are removed, from notes too. What a student wrote into an answer stays.
    """
    hidden = [_hidden(one, pseudonym(one.student, secret)) for one in results]
    if len({one.student for one in hidden}) < len(hidden):
        raise UserError("two students have one pseudonym: use another secret.")
    return sorted(hidden, key=lambda one: one.student)


def key_table(students: Iterable[str], secret: bytes) -> str:
    """The CSV file that maps pseudonyms back to students. Keep it apart from the reports."""
    rows = sorted((pseudonym(student, secret), student) for student in students)
    return table([("pseudonym", "student"), *rows])


def _hidden(one: Result, name: str) -> Result:
    real = one.student

    def clean(text: str) -> str:
        renamed = re.sub(rf"(?<!\w){re.escape(real)}(?!\w)", name, text)
        return FILE_NAME.sub(" a notebook", renamed).strip()

    return replace(
        one,
        student=name,
        file="",
        problem=clean(one.problem),
        account=None,
        notes=[replace(note, text=clean(note.text)) for note in one.notes],
        questions=[
            replace(question, notes=[clean(note) for note in question.notes])
            for question in one.questions
        ],
    )
