"""The cells of a notebook: their numbers, tags and outputs."""

import ast
import hashlib
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

GUESS = "guess"
RAISES_TAGS = {"raises-exception", "nbval-raises-exception"}
NBVAL_COMMENT = re.compile(r"^\s*#\s*(NBVAL_\w+)", re.MULTILINE)
ESCAPE = re.compile(r"\x1b\[[\d;]*m")  # a colour of the terminal


def numbered(notebook: "NotebookNode") -> list[tuple[int, "NotebookNode"]]:
    """The code cells with their numbers: n is Jupyter's In [n] in a run from top to bottom."""
    # Jupyter does not send an empty cell to the kernel.
    code = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    return list(enumerate(code, 1))


def tags(cell: "NotebookNode") -> list[str]:
    """The cell's tags."""
    return list(cell.metadata.get("tags", []))


def may_raise(cell: "NotebookNode") -> bool:
    """Whether a tag announces that the cell raises an exception."""
    return bool(RAISES_TAGS & set(tags(cell)))


def nbval_comment(cell: "NotebookNode") -> str:
    """The cell's first comment for nbval, such as "NBVAL_IGNORE_OUTPUT"; "" if it has none."""
    match = NBVAL_COMMENT.search(cell.source)
    return match[1] if match else ""


def printed(notebook: "NotebookNode") -> str:
    """Everything that the cells print or return as plain text, without terminal colours.

    What a browser shows as Markdown, such as a claim, is left out.
    """
    texts = []
    for _, cell in numbered(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                texts.append(output.text)
            elif output.output_type != "error" and "text/markdown" not in output.data:
                texts.append(output.data.get("text/plain", "") + "\n")
    return ESCAPE.sub("", "".join(texts)).replace("\r\n", "\n")


def output_hashes(notebook: "NotebookNode") -> list[str]:
    """One hash per code cell, of the cell's outputs."""
    return [
        hashlib.sha256(json.dumps(cell.outputs, sort_keys=True).encode()).hexdigest()[:12]
        for _, cell in numbered(notebook)
    ]


def first_line(text: object) -> str:
    """The first line of a text that may be empty."""
    return next(iter(str(text).strip().splitlines()), "")


# ---- cells that are tagged "guess" ----------------------------------------------------------


def guess_problem(source: str) -> str:
    """What is wrong with a guess cell; "" if it only assigns values to names guess_…"""
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        return f"is no Python: {error.msg}"
    if not body:
        return "assigns nothing"
    for statement in body:
        if not _is_guess(statement):
            line = first_line(ast.unparse(statement))
            return f"has `{line}`, but a guess cell only assigns names that begin with guess_"
        if isinstance(statement.value, ast.Constant) and statement.value.value is None:
            return f"has no value for {statement.targets[0].id}"
    return ""


def without_guesses(source: str) -> str:
    """The source of a guess cell with None in place of each value; comments are kept."""
    text = source.encode()
    starts = [0]  # ast counts in bytes
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for statement in reversed(ast.parse(source).body):
        if _is_guess(statement):
            value = statement.value
            begin = starts[value.lineno - 1] + value.col_offset
            end = starts[value.end_lineno - 1] + value.end_col_offset
            text = text[:begin] + b"None" + text[end:]
    return text.decode()


def _is_guess(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
        and statement.targets[0].id.startswith("guess_")
    )
