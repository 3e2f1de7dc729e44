"""What a student can change in a notebook: outputs, tags, checks, cells, the format."""

import gzip
import json
from typing import Any

from attack import Attack, Notebook

WRONG = {"total": "# answer: total\ndef total(numbers):\n    return 0.0\n"}
RIGHT = "# answer: total\ndef total(numbers):\n    return sum(numbers)\n"
ONLY_ANSWERS = "only the text of answer cells is taken from a notebook"
SAID = "right: it is the sum\n"


def _code(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _text(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def _checks(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in _code(notebook) if "exercise.check" in _text(cell)]


def _answer(notebook: Notebook, name: str = "total") -> dict[str, Any]:
    [cell] = [c for c in notebook["cells"] if c["metadata"].get("grade_id") == name]
    return cell


def edit_outputs(notebook: Notebook) -> None:
    for cell in _checks(notebook):
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": SAID}]
        cell["execution_count"] = 1


def skip(notebook: Notebook) -> None:
    for cell in _checks(notebook):
        cell["source"] = "# NBVAL_SKIP\n" + _text(cell)


def change_checks(notebook: Notebook) -> None:
    for cell in _checks(notebook):
        cell["source"] = f"print({SAID!r}, end='')"


def own_exercise(notebook: Notebook) -> None:
    notebook["cells"][1]["source"] = (
        "# setup\nclass Exercise:\n    def check(self, *a, **k): raise SystemExit\n"
        "exercise = Exercise()"
    )


def second_answer(notebook: Notebook) -> None:
    cell = dict(_answer(notebook), source=RIGHT)
    notebook["cells"].append(cell)


def same_ids(notebook: Notebook) -> None:
    for cell in notebook["cells"]:
        cell["id"] = "same"


def odd_metadata(notebook: Notebook) -> None:
    for cell, value in zip(
        notebook["cells"], ([], {"a": 1}, None, 1e308, "mean"), strict=False
    ):
        cell["metadata"] = {"grade_id": value}
    notebook["cells"] += [None, 7, "cell", [], {}, {"cell_type": "code"}]
    notebook["cells"].append({"cell_type": "code", "metadata": [], "source": [1, None]})
    notebook["metadata"] = {"kernelspec": {"name": "rm -rf /", "language": "bash"}}


def many_cells(notebook: Notebook) -> None:
    more = {"cell_type": "code", "metadata": {}, "source": "while True: pass"}
    notebook["cells"] += [more] * 40_000


def version_3(notebook: Notebook) -> None:
    cells = notebook.pop("cells")
    for cell in cells:
        if cell["cell_type"] == "code":
            cell["input"] = cell.pop("source")
            cell["language"] = "python"
    notebook["worksheets"] = [{"cells": cells, "metadata": {}}]
    notebook |= {"nbformat": 3, "nbformat_minor": 0}


def version_9(notebook: Notebook) -> None:
    notebook |= {"nbformat": 9, "nbformat_minor": 99, "new": {"field": True}}


def long_answer(notebook: Notebook) -> None:
    _answer(notebook)["source"] = RIGHT + "#" * 300_000


def surrogate(notebook: Notebook) -> None:
    _answer(notebook)["source"] = RIGHT + "text = '\ud800'\n"


def other_kind(notebook: Notebook) -> None:
    right = dict(_answer(notebook), source=RIGHT, cell_type="raw")
    notebook["cells"].insert(0, right)


def reverse(notebook: Notebook) -> None:
    notebook["cells"].reverse()


def exchange_ids(notebook: Notebook) -> None:
    one, other = _answer(notebook, "total"), _answer(notebook, "mean")
    one["metadata"]["grade_id"], other["metadata"]["grade_id"] = "mean", "total"


def in_pieces(notebook: Notebook) -> None:
    cell = _answer(notebook)
    cell["source"] = [*"".join(cell["source"]), *[""] * 500_000, None, 7, {}]


def forged_attachments(notebook: Notebook) -> None:
    for cell in notebook["cells"]:
        cell["attachments"] = {"image.png": {"image/png": "A" * 300_000}}
        cell["outputs"] = [{"output_type": "display_data", "data": {"text/html": "<script>"}}]


def large(text: str) -> bytes:
    made = json.loads(text)
    made["metadata"]["padding"] = "x" * (80 << 20)
    return json.dumps(made).encode()[: (8 << 20) + 1]  # a reader of files reads no more


def _attack(name: str, tries: str, change, deserved: float = 6, held_by: str = ONLY_ANSWERS):
    return Attack(name, tries, held_by, deserved, WRONG, change)


PARSED = (
    "the file is parsed as JSON within limits; what is no notebook scores 0, with a reason"
)

ATTACKS = [
    _attack("outputs edited", "stored outputs that say right", edit_outputs),
    Attack(
        "NBVAL_SKIP in the answer",
        "a comment that makes nbval skip the answer",
        ONLY_ANSWERS,
        6,
        {"total": "# NBVAL_SKIP\n" + WRONG["total"]},
    ),
    _attack("checks changed", "checks that print what is expected", change_checks),
    _attack("an Exercise of its own", "a setup cell that replaces the checks", own_exercise),
    _attack(
        "two answers, the second right",
        "two tries",
        second_answer,
        held_by="the first answer cell counts, and a note says so",
    ),
    Attack("ids twice", "to stop the batch", "cells' ids are not used", 10, {}, same_ids),
    Attack(
        "odd cells and metadata",
        "to stop the batch",
        "what is no cell is passed over; kernelspecs are not used",
        10,
        {},
        odd_metadata,
    ),
    Attack("40,000 cells", "time and memory", "2,000 cells are read", 10, {}, many_cells),
    Attack("nbformat 3", "to stop the batch", "it has no cells: refused", 0, {}, version_3),
    Attack(
        "nbformat 9", "to stop the batch", "what is needed of it is read", 10, {}, version_9
    ),
    _attack(
        "an answer of 300,000 characters",
        "time and memory",
        long_answer,
        held_by="an answer has at most 200,000 characters",
    ),
    _attack(
        "half a surrogate pair",
        "text that no report can write",
        surrogate,
        10,
        "such characters are replaced",
    ),
    Attack(
        "NUL in the answer",
        "a parser that stops early",
        "Python refuses it; the checks see an error",
        6,
        {"total": RIGHT + "\0"},
    ),
    Attack(
        "magics",
        "%notmagic and !exit 7, which nbval passes",
        "the answer runs as Python, not in IPython",
        6,
        {"total": "# answer: total\n%notmagic\n!exit 7\n" + WRONG["total"]},
    ),
    Attack("deep JSON", "to end the parser", PARSED, 0, data=lambda _: b"[" * (7 << 20)),
    Attack("a number of 7 MB", "hours of parsing", PARSED, 0, data=lambda _: b"9" * (7 << 20)),
    Attack("80 MB of notebook", "time and memory", "at most 8 MiB are read", 0, data=large),
    _attack(
        "an answer in another kind of cell",
        "a right answer in a raw cell before the wrong one",
        other_kind,
        held_by="only code cells are answers, and a note says so",
    ),
    Attack("cells in reverse", "to stop the batch", "the order is not used", 10, {}, reverse),
    Attack(
        "ids exchanged",
        "each answer under the other question's id",
        "the id decides, before the first line",
        2,
        {},
        exchange_ids,
    ),
    Attack(
        "a text of half a million pieces", "time", "the pieces are joined", 10, {}, in_pieces
    ),
    Attack(
        "attachments and outputs",
        "4 MB of attachments, and a script in each output",
        ONLY_ANSWERS,
        10,
        {},
        forged_attachments,
    ),
    Attack(
        "a compressed notebook",
        "to be unpacked (gzip)",
        "nothing is unpacked: what is no text scores 0, with a reason",
        0,
        data=lambda text: gzip.compress(text.encode()),
    ),
    Attack(
        "text in UTF-16",
        "to stop the batch",
        PARSED,
        0,
        data=lambda text: text.encode("utf-16"),
    ),
    Attack(
        "a mark before the text, and numbers that are none",
        "to stop the batch: a byte order mark, NaN and Infinity",
        PARSED,
        10,
        data=lambda text: (
            b"\xef\xbb\xbf" + text.replace("{", '{"n": [NaN, -Infinity],', 1).encode()
        ),
    ),
]
