"""Pairs of students whose answers to a question are alike. A reason to look, not a proof.

Answers are compared as sets of shingles: all runs of five tokens (A. Broder, On the
resemblance and containment of documents, 1997). Names of variables, strings, comments and
spaces do not count, nor does the order of functions. difflib compares 200 students' answers in
minutes, sets in seconds, and difflib depends on the order of the functions.

Words are found by a pattern: Python's parser can crash on text that is made for it.
"""

import builtins
import keyword
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from multigpu.grading.results import Result
from multigpu.grading.texts import one_line

SHINGLE = 5
# Answers with fewer shingles of their own are short: all right ones are alike.
MIN_SHINGLES = 25
MAX_CHARACTERS = 10_000
KEPT = frozenset(keyword.kwlist) | frozenset(dir(builtins))
# A text without an end reaches to that of the line or of the answer, so that it is read once.
TEXT = (
    r"""(?:"{3}.*?(?:"{3}|\Z)|'{3}.*?(?:'{3}|\Z)"""
    r"""|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)"""
)
ALONE = re.compile(rf"^[ \t]*{TEXT}[ \t]*(?:#.*?)?$", re.DOTALL | re.MULTILINE)
TOKEN = re.compile(rf"#[^\n]*|(?P<text>{TEXT})|(?P<word>\w+)|[^\w\s]", re.DOTALL)


class Pair(NamedTuple):
    """Two students, and the share of their shingles that both have, from 0 to 1."""

    question: str
    first: str
    second: str
    similarity: float
    shingles: int


def pairs(
    results: Sequence[Result], released: Mapping[str, str], threshold: float = 0.8
) -> list[Pair]:
    """All pairs with at least this similarity, the most similar first.

    released   the text of each question's answer cell, as students got it; what an answer has
               of it does not count
    """
    found = []
    ids: dict[tuple[str, ...], int] = {}
    names = [question.name for question in results[0].questions] if results else []
    for place, name in enumerate(names):
        given = shingles(released.get(name, ""))
        own = []
        for one in results:
            question = one.questions[place]
            if not question.blank:
                rest = shingles(question.answer) - given
                if len(rest) >= MIN_SHINGLES:
                    numbered = {ids.setdefault(each, len(ids)) for each in rest}
                    own.append((one.student, numbered))
        for (first, a), (second, b) in combinations(own, 2):
            if min(len(a), len(b)) < threshold * max(len(a), len(b)):
                continue
            both = len(a & b)
            similarity = both / (len(a) + len(b) - both)
            if similarity >= threshold:
                found.append(Pair(name, first, second, similarity, both))
    found.sort(key=lambda pair: (-pair.similarity, -pair.shingles, pair.question, pair.first))
    return found


def text(found: Sequence[Pair], most: int = 50) -> str:
    """The pairs as a table."""
    if not found:
        return "no two answers are alike\n"
    lines = [
        f"{pair.similarity:>5.0%}  {pair.question}: {one_line(pair.first)} and "
        f"{one_line(pair.second)} ({pair.shingles} runs of {SHINGLE} tokens in both)"
        for pair in found[:most]
    ]
    if len(found) > most:
        lines.append(f"and {len(found) - most} more: the question may have one natural answer")
    return "\n".join(lines) + "\n"


def shingles(source: str) -> frozenset[tuple[str, ...]]:
    """All runs of five tokens of the first 10,000 characters."""
    found = tokens(source[:MAX_CHARACTERS])
    return frozenset(zip(*(found[start:] for start in range(SHINGLE)), strict=False))


def tokens(source: str) -> list[str]:
    """The words and signs, without comments and texts that stand alone.

    A variable's name is `v`, a text `s`. Names after a dot, keywords and Python's own stay.
    """
    found: list[str] = []
    for match in TOKEN.finditer(ALONE.sub("", source)):
        word = match["word"]
        if match["text"]:
            found.append("s")
        elif word and word.isidentifier() and word not in KEPT and found[-1:] != ["."]:
            found.append("v")
        elif not match[0].startswith("#"):
            found.append(match[0])
    return found
