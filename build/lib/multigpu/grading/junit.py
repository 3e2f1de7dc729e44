"""junit.xml: a suite per student, a case per check. For the instructor: it has hidden checks.

A failure is a wrong answer; an error is a check that the machine could not run. Points by hand
do not change a case: they are properties of the suite.
"""

from collections.abc import Sequence
from xml.etree import ElementTree

from multigpu.grading.csv_cells import number
from multigpu.grading.marks import Marked, MarkedQuestion
from multigpu.grading.results import PartResult
from multigpu.grading.texts import visible


def junit(marks: Sequence[Marked], lesson: str) -> str:
    """The XML document, in the form of Ant's JUnit task, which CI servers read."""
    root = ElementTree.Element("testsuites", name=visible(lesson))
    for one in marks:
        root.append(_suite(one))
    _count(root)
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _suite(one: Marked) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=visible(one.student))
    properties = ElementTree.SubElement(suite, "properties")
    shown = {"total": number(one.total) or "blocked", "out of": number(one.points)}
    for override in one.overrides:
        check = f"/{override.check}" if override.check else ""
        shown[f"by hand: {override.question}{check}"] = (
            f"{number(override.points)}: {override.reason}"
        )
    for count, note in enumerate(one.notes, 1):
        shown[f"note {count}"] = note
    for name, value in shown.items():
        ElementTree.SubElement(
            properties, "property", name=visible(name), value=visible(value)
        )
    for question in one.questions:
        for part in question.measured.parts:
            suite.append(_case(one, question, part))
    _count(suite)
    return suite


def _case(one: Marked, question: MarkedQuestion, part: PartResult) -> ElementTree.Element:
    title = f"{part.title} (hidden)" if part.hidden else part.title
    case = ElementTree.Element(
        "testcase",
        classname=visible(f"{one.student}.{question.measured.name}"),
        name=visible(title),
    )
    if part.status == "right":
        return case
    kind = "error" if part.status == "blocked" else "failure"
    lines = [one.result.problem] if one.result.problem else part.lines
    reason = "no answer" if question.measured.blank else "wrong"
    message = next(iter(lines), reason if kind == "failure" else "blocked")
    outcome = ElementTree.SubElement(
        case, kind, message=visible(message), type="blocked" if kind == "error" else reason
    )
    outcome.text = visible("\n".join(lines))
    return case


def _count(element: ElementTree.Element) -> None:
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    element.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    element.set("errors", str(sum(case.find("error") is not None for case in cases)))
