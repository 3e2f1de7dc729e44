"""nbval's cells under Jupyter's numbers, and its failures without colours: stored …, now …

A plugin of pytest. nbval counts cells from 0, and prints a diff in which + is the stored text.
"""

import difflib
from collections.abc import Iterable, Iterator

import nbval.kernel
from kernels import PrivateKernel
from nbval.plugin import IPyNbCell, IPyNbFile, NbCellError
from pytest import ExceptionInfo

from multigpu.notebooks.cells import ESCAPE

LINES = 24  # of a difference


class NumberedCell(IPyNbCell):
    """A cell of a notebook as a test: notebooks/STEM.ipynb::In [12]."""

    def repr_failure(self, excinfo: ExceptionInfo) -> str:
        """The cell's number, what is wrong, its source, what differs or its error, the fix."""
        error = excinfo.value
        if not isinstance(error, NbCellError):
            return f"{self.name}: {type(error).__name__}: {error}"
        place = f"{self.path.name}, {self.name}"
        source = "\n".join(f"    {line}" for line in self.cell.source.splitlines())
        if str(error) != "Cell outputs differ":
            trace = ESCAPE.sub("", error.inner_traceback or "")
            return f"{place}: {error}\n{source}\n{trace}\n{self.fix}"
        stored = lines_of(self.cell.outputs, self.sanitize)
        now = lines_of(self.test_outputs, self.sanitize)
        return "\n".join(
            [
                f"{place}: the output is not the stored one",
                source,
                *diff(stored, now),
                self.fix,
            ]
        )

    @property
    def fix(self) -> str:
        """The command that makes the notebook afresh."""
        if self.path.parent.name == "notebooks":
            return f"If the new output is right: multigpu notebooks run {self.path.stem}"
        return f"If the new output is right, run {self.path.name} again and save it."

    def reportinfo(self):
        return self.path, None, f"{self.path.name}: {self.name}"


def lines_of(outputs: Iterable, sanitize) -> list[str]:
    """The outputs as nbval compares them: lines, without what the sanitize file names."""
    lines = []
    for output in outputs:
        if output.output_type == "stream":
            texts = {output.name: output.text}
        elif output.output_type == "error":
            texts = {"error": f"{output.ename}: {output.evalue}"}
        else:
            texts = output.data
        for kind, text in texts.items():
            if kind.startswith("image/"):
                lines.append(f"({kind})")
            else:
                lines += sanitize(str(text)).replace("\r\n", "\n").splitlines()
    return lines


def diff(stored: list[str], now: list[str]) -> list[str]:
    """The lines that differ, each as `stored: …` or `now:    …`."""
    lines = []
    for change, a, b, c, d in difflib.SequenceMatcher(None, stored, now, False).get_opcodes():
        if change != "equal":
            # Blanks at the end of a line, which cannot be seen, make two lines differ, too.
            lines += [f"stored: {shown(line)}" for line in stored[a:b] or ["(nothing)"]]
            lines += [f"now:    {shown(line)}" for line in now[c:d] or ["(nothing)"]]
    if not lines:
        lines = ["The texts are equal: outputs differ in their number, order or kind."]
    if len(lines) > LINES:
        lines[LINES:] = [f"… {len(lines) - LINES} more lines"]
    return lines


def shown(line: str) -> str:
    """The line; with quotes if it has blanks or control characters that cannot be seen."""
    return line if line.isprintable() and line == line.strip() else repr(line)


def pytest_configure() -> None:
    """From now on nbval collects these cells, and starts these kernels."""
    nbval.kernel.KernelManager = PrivateKernel
    collect_cells = IPyNbFile.collect

    def collect(self: IPyNbFile) -> Iterator[NumberedCell]:
        for cell in collect_cells(self):
            count = cell.cell.execution_count
            yield NumberedCell.from_parent(
                self,
                name=cell.name if count is None else f"In [{count}]",
                cell_num=cell.cell_num,
                cell=cell.cell,
                options=cell.options,
            )

    IPyNbFile.collect = collect
