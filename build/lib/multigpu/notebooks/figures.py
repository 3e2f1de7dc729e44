"""The figures on pages: a marker before each names the notebook or file that gives it.

A marker is an HTML comment, which readers do not see. The figure follows it directly:

    <!--= PT_CNN_DataParallel.ipynb "NVLink2: .* 64: ([\\d.]+)" -->0.63
    <!--= lesson05.json rows.0.median .2f -->1.84×
    <!--= given -->4,096 images

- STEM.ipynb "REGEX" [FORMAT]: what the group matches in the text that the stored notebook
  prints. All matches must give the same text.
- FILE.json PATH FORMAT: the number at PATH (keys and indices, joined by dots) in
  benchmarks/FILE.json, or in lessons/…/FILE.json if a folder is named.
- given: chosen by the lesson, not measured.

With a FORMAT, the number is formatted as Python's format() does. `?` in place of a figure is
filled in by `write`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from multigpu.course import find_root
from multigpu.errors import UserError
from multigpu.files import atomic
from multigpu.notebooks import cells

NUMBER = r"[-+]?\d(?:[\d,.]*\d)?(?:e[-+]?\d+)?%?"
WORD = r'(?:(?!-->)[^\s"])+'
QUOTED = r'"(?:(?!-->)[^"])*"'
MARKER = re.compile(
    rf"<!--=\s+(?P<file>{WORD})(?:\s+(?P<select>{QUOTED}|{WORD}))?(?:\s+(?P<form>{WORD}))?"
    rf"\s*-->(?P<figure>{NUMBER}|\?)?"
)
BEGIN = re.compile("<!--=")
UNITS = (
    "%|×|times|ns|µs|ms|s|min|bytes|B|[KMGT]i?B|(?:[KMGT]i?B|images|samples|steps|tokens)/s|"
    "[GT]FLOPS?"
)
# What looks measured: a decimal, a power of ten, a number with a unit.
MEASURED = re.compile(
    rf"(?<![\w.])(?:\d[\d,]*\.\d+|\d[\d.]*e[-+]?\d+|\d[\d,.]*\s?(?:{UNITS})(?!\w))"
)
# No figures of the text: code, links' addresses, comments, versions, goals.
NO_FIGURES = re.compile(
    r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|\(goal[^)]*\)"
    r"|\b(?:torch|PyTorch|Python|TensorFlow|Keras|Lightning|CUDA|Bagua|Horovod) [\d.]+\d",
    re.DOTALL,
)
RESULTS = re.compile(r"saw|measured|result", re.IGNORECASE)


@dataclass(frozen=True)
class Figure:
    """A marked figure: its page, what the page has, and what it should have.

    problem   why there is no value: one clause; "" if there is one
    """

    page: Path
    line: int
    marker: str
    shown: str
    value: str = ""
    problem: str = ""


def pages(root: Path) -> list[Path]:
    """The pages, and the scripts, whose prose is the notebooks'."""
    lessons = root.glob("lessons/**/*.md")
    return [
        root / "README.md",
        *sorted(page for page in lessons if ".ipynb_checkpoints" not in page.parts),
        *sorted(root.glob("tests/*/README.md")),
        *sorted(root.glob("scripts/*.py")),
    ]


def check(root: Path | None = None) -> list[str]:
    """One sentence per marked figure that is not what its source gives."""
    root = root or find_root()
    findings = []
    for page in pages(root):
        for figure in read(page, root):
            place = f"{page.relative_to(root)}:{figure.line}"
            if figure.problem:
                findings.append(f"{place}: {figure.marker}: {figure.problem}")
            elif figure.shown != figure.value:
                findings.append(
                    f"{place}: the page has {figure.shown or 'no figure'}, "
                    f"{figure.marker} gives {figure.value}"
                )
    return findings


def write(root: Path | None = None) -> list[str]:
    """Write the figures that their sources give; return the pages that have changed.

    Raises UserError, and changes no page, if a source gives no value or a marker cannot be
    parsed.
    """
    root = root or find_root()
    texts = {page: page.read_text(encoding="utf-8") for page in pages(root)}
    changed = {}
    for page, text in texts.items():
        figures = list(read(page, root))
        for figure in figures:
            if figure.problem:
                name = figure.page.relative_to(root)
                raise UserError(f"{name}:{figure.line}: {figure.marker}: {figure.problem}.")
        values = iter(figure.value for figure in figures)

        def replaced(match: re.Match, values: Iterator[str] = values) -> str:
            return match[0].partition("-->")[0] + "-->" + next(values)

        new = MARKER.sub(replaced, text)
        if new != text:
            changed[page] = new
    for page, text in changed.items():
        with atomic(page) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [str(page.relative_to(root)) for page in changed]


def read(page: Path, root: Path) -> Iterator[Figure]:
    """The page's marked figures, in order. A marker that cannot be parsed has a problem."""
    text = page.read_text(encoding="utf-8")
    for begin in BEGIN.finditer(text):
        line = text.count("\n", 0, begin.start()) + 1
        match = MARKER.match(text, begin.start())
        if match is None:
            marker = text[begin.start() :].splitlines()[0][:80]
            problem = 'it cannot be parsed; a "REGEX" has no quotes in it'
            yield Figure(page, line, marker, "", problem=problem)
            continue
        shown = match["figure"] or ""
        marker = match[0].removesuffix(shown)
        try:
            value = shown if match["file"] == "given" else _value(match, root)
        except UserError as error:
            yield Figure(page, line, marker, shown, problem=str(error))
        else:
            yield Figure(page, line, marker, shown, value)


def unmarked(text: str) -> list[str]:
    """The measured figures without a marker in a page's sections of results.

    Such a section has `saw`, `measured` or `result` in its heading. Raises ValueError if a
    page has none.
    """
    sections = re.split(r"^(?=#+ )", text, flags=re.MULTILINE)
    results = [one for one in sections if RESULTS.search(one.partition("\n")[0])]
    if not results:
        raise ValueError("the page has no section of results: name one so")
    return [
        match[0]
        for section in results
        for match in MEASURED.finditer(NO_FIGURES.sub("", MARKER.sub("", section)))
    ]


def _value(match: re.Match, root: Path) -> str:
    name, select, form = match["file"], match["select"], match["form"]
    if select is None:
        raise UserError('expected FILE PATH FORMAT or STEM.ipynb "REGEX"')
    try:
        if name.endswith(".ipynb"):
            found = _from_notebook(root / "notebooks" / name, select)
            return format(float(found.replace(",", "")), form) if form else found
        path = root / (name if "/" in name else f"benchmarks/{name}")
        return format(_from_json(path, select), form or "")
    except (ValueError, re.error) as error:
        raise UserError(f"wrong format or expression ({error})") from None


def _from_notebook(path: Path, select: str) -> str:
    import nbformat

    try:
        text = cells.printed(nbformat.read(path, as_version=4))
    except FileNotFoundError:
        raise UserError(f"there is no notebooks/{path.name}") from None
    except Exception as error:
        # A damaged file can make nbformat raise any exception.
        reason = cells.first_line(error)
        raise UserError(f"notebooks/{path.name} cannot be read ({reason})") from None
    pattern = re.compile(select.strip('"'), re.MULTILINE)
    if pattern.groups != 1:
        raise UserError("the expression needs one group, in parentheses")
    found = {match[1] for match in pattern.finditer(text)}
    if len(found) != 1:
        different = f"{len(found)} different figures" if found else "nothing"
        raise UserError(f"it matches {different} in what the notebook prints")
    return found.pop()


def _from_json(path: Path, select: str) -> float:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        for key in select.split("."):
            value = value[int(key) if isinstance(value, list) else key]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"there is no such number ({type(error).__name__})") from None
    return value
