"""The figures on pages are what their notebook or file gives."""

import json

import nbformat
import pytest
from commands import ROOT
from nbformat import v4

from multigpu.course import LESSONS
from multigpu.errors import UserError
from multigpu.notebooks import figures, source

# Every measured figure in their sections of results has a marker.
PAGES = [
    f"lessons/{lesson.slug}/README.md"
    for lesson in LESSONS
    if not source.path_of(lesson.notebooks[0].stem, ROOT)
]


def test_every_marked_figure_is_what_its_source_gives():
    assert figures.check(ROOT) == [], "multigpu notebooks figures --write"


@pytest.mark.parametrize("page", PAGES)
def test_every_measured_figure_has_a_marker(page):
    assert figures.unmarked((ROOT / page).read_text()) == []


# ---- the markers ----------------------------------------------------------------------------


@pytest.fixture
def course(tmp_path):
    """course(text) is a folder whose README.md has the text."""
    for name in ("scripts", "notebooks", "benchmarks", "lessons/01-x"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    text = "\x1b[32mNVLink2: 16: 0.50, 64: 0.63, 1,024: 1.66\x1b[0m\r\n"
    text += "PCIe3: 16: 0.40, 64: 0.35\n"
    output = v4.new_output("stream", text=text)
    result = v4.new_output("execute_result", data={"text/plain": "('apart', 3.6e-07)"})
    cell = v4.new_code_cell("run()", outputs=[output, result], execution_count=1)
    nbformat.write(v4.new_notebook(cells=[cell]), tmp_path / "notebooks" / "A.ipynb")
    (tmp_path / "notebooks" / "broken.ipynb").write_text("{<<<<<<<")
    rows = {"rows": [{"median": 1.8367}, {"median": -0.06}]}
    (tmp_path / "benchmarks" / "a.json").write_text(json.dumps(rows))
    (tmp_path / "lessons" / "01-x" / "b.json").write_text('{"steps": 1024}')

    def make(text: str):
        (tmp_path / "README.md").write_text(text)
        return tmp_path

    return make


GOOD = [
    '<!--= A.ipynb "NVLink2: .* 64: ([\\d.]+)" -->0.63 times',
    '<!--= A.ipynb "1,024: ([\\d.]+)" .1f -->1.7.',
    '<!--= A.ipynb "^PCIe3: 16: ([\\d.]+)" -->0.40, and more',
    '<!--= A.ipynb "apart\', (\\S+)\\)" -->3.6e-07',
    "<!--= a.json rows.0.median .2f -->1.84×",
    "<!--= a.json rows.1.median +.0% -->-6%",
    "<!--= lessons/01-x/b.json steps , -->1,024 steps",
    "<!--= given -->4,096 images",
]


@pytest.mark.parametrize("text", GOOD)
def test_a_figure_that_is_right(course, text):
    root = course(text)
    assert figures.check(root) == []
    assert figures.write(root) == []


@pytest.mark.parametrize("text", GOOD[:-1])
def test_a_figure_that_is_wrong_is_found_and_written(course, text):
    marker, _, rest = text.partition("-->")
    for wrong in ("9.99", "?", "1,000e-3%"):
        tail = rest.lstrip("-+0123456789.,e%")
        root = course(f"x {marker}-->{wrong} {tail}")
        (finding,) = figures.check(root)
        assert finding.startswith("README.md:1:") and wrong in finding
        assert figures.write(root) == ["README.md"]
        assert figures.check(root) == []


@pytest.mark.parametrize(
    ("marker", "fact"),
    [
        ('B.ipynb "x(1)"', "no notebooks/B.ipynb"),
        ('A.ipynb "64: ([\\d.]+)"', "2 different figures"),
        ('A.ipynb "H100: ([\\d.]+)"', "matches nothing"),
        ('A.ipynb "64: [\\d.]+"', "group"),
        ("A.ipynb", "expected"),
        ('A.ipynb "64: ("', "expression"),
        ('A.ipynb "(NVLink2)" .1f', "format"),
        ("a.json rows.0.median .2q", "format"),
        ('broken.ipynb "(1)"', "cannot be read"),
        ("a.json rows.7.median .2f", "no such number"),
        ("c.json rows .2f", "no such number"),
    ],
)
def test_a_marker_without_a_value_is_found_and_writes_nothing(course, marker, fact):
    text = f"<!--= a.json rows.0.median .2f -->0.1, <!--= {marker} -->0.5"
    root = course(text)
    assert any(fact in finding for finding in figures.check(root))
    with pytest.raises(UserError, match=r"README\.md:1"):
        figures.write(root)
    assert (root / "README.md").read_text() == text


@pytest.mark.parametrize(
    "marker",
    [
        '<!--= A.ipynb "padding=\\"same\\": ([\\d.]+)" -->?',
        '<!--= A.ipynb "64: ([\\d.]+) -->0.63',
        "<!--= a.json rows.0.median .2f x -->1.84",
        "<!--= -->1.84",
        "<!--=a.json rows.0.median .2f -->1.84",
        "<!--= a.json rows.0.median .2f",
    ],
)
def test_a_marker_that_cannot_be_parsed_is_found_and_writes_nothing(course, marker):
    text = f'<!--= a.json rows.0.median .2f -->0.1\n{marker} "x" .1f -->0.5\n{GOOD[0]}'
    root = course(text)
    findings = figures.check(root)
    assert [one for one in findings if "README.md:2:" in one and "cannot be parsed" in one]
    with pytest.raises(UserError, match=r"README\.md:2.*cannot be parsed"):
        figures.write(root)
    assert (root / "README.md").read_text() == text


def test_figures_in_a_scripts_prose(course):
    root = course("")
    script = root / "scripts" / "A.py"
    script.write_text("# %% [markdown]\n# <!--= a.json rows.0.median .2f -->1.99 times.\n")
    assert len(figures.check(root)) == 1
    assert figures.write(root) == ["scripts/A.py"]
    assert "1.84 times." in script.read_text()


# ---- which figures need one -----------------------------------------------------------------

PAGE = """# A page
3.5 ms above the results, 12%
## What we saw
{}
## Run it
It takes 40.5 s.
"""


@pytest.mark.parametrize(
    "text",
    [
        "0.63 times",
        "1.84×",
        "12%",
        "233 MiB",
        "5.07 ms",
        "3 µs",
        "1e-07",
        "| 153,128 bytes |",
        "12,115 images/s",
        "**0.5**",
        "(1.7)",
    ],
)
def test_a_measured_figure_without_a_marker_is_found(text):
    assert len(figures.unmarked(PAGE.format(f"It is {text} so."))) == 1
    assert (
        figures.unmarked(PAGE.format(f"It is <!--= given -->{text.strip('*(| ')} so.")) == []
    )


@pytest.mark.parametrize(
    "text",
    [
        "two GPUs",
        "16 and 16",
        "lesson 05",
        "torch 2.13",
        "TensorFlow 2.21.0",
        "`--lr 0.1`",
        "[page](../a/1.5.html)",
        "a batch of 4,096",
        "(goal at most 1.10×)",
        "```\n0.5 ms\n```",
    ],
)
def test_what_is_no_measured_figure_needs_none(text):
    assert figures.unmarked(PAGE.format(f"It is {text} so.")) == []


def test_a_page_without_results_is_an_error():
    with pytest.raises(ValueError, match="section"):
        figures.unmarked("# A page\n0.5 ms\n")
