"""A notebook from its Markdown source: programs, links, the last cell, form, claims."""

import nbformat
import pytest
from nbformat import v4

from multigpu import lesson
from multigpu import notebooks as pairs
from multigpu.errors import UserError
from multigpu.notebooks import claims, source

SCRIPT = '''\
"""A program."""

import functools


@functools.cache
def double(x):
    """Twice x."""
    return 2 * x


class Model:
    size = 3
'''
SOURCE = """\
# A lesson

See [the page](README.md), [a word](../README.md#rank), ![it](one.png),
[web](https://example.org), [below](#end).

```python
import functools
```

```python program="double Model"
```

```python tags=["guess"]
guess_four = 4
```

```python
print(double(2), Model.size)
```
"""
STEM = "PT_CNN_DataParallel"
PAGE = "lessons/02-data-parallel"


@pytest.fixture
def course(tmp_path):
    for name in ("scripts", "notebooks", PAGE):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "scripts" / f"{STEM}.py").write_text(SCRIPT)
    (tmp_path / PAGE / f"{STEM}.md").write_text(SOURCE)
    (tmp_path / PAGE / "README.md").touch()
    return tmp_path


def read(course, text: str = SOURCE):
    path = course / PAGE / f"{STEM}.md"
    path.write_text(text)
    return source.read(path, course)


def test_a_program_has_the_text_of_the_script_with_its_decorators(course):
    text = read(course).cells[2].source
    assert text.startswith("@functools.cache\ndef double(x):")
    assert text.endswith("return 2 * x\n\n\nclass Model:\n    size = 3")


def test_a_program_can_be_in_another_file_of_the_lesson(course):
    (course / PAGE / "more.py").write_text("def triple(x):\n    return 3 * x\n")
    text = SOURCE.replace('"double Model"', '"triple" file="more.py"')
    assert read(course, text).cells[2].source == "def triple(x):\n    return 3 * x"
    with pytest.raises(UserError, match=r"double, which more\.py does not define"):
        read(course, SOURCE.replace('"double Model"', '"double" file="more.py"'))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"double Model"', '"double Modell"', "Modell.*did you mean 'Model'"),
        ("```\n\n```python tags", "pass\n```\n\n```python tags", "text of its own"),
    ],
)
def test_a_program_that_is_not_the_scripts_is_an_error_of_check(course, before, after, words):
    with pytest.raises(UserError, match=words):
        read(course, SOURCE.replace(before, after, 1))
    nbformat.write(v4.new_notebook(), course / "notebooks" / f"{STEM}.ipynb")
    (finding,) = pairs.check([STEM], course)
    assert source.PROGRAM in finding


def test_links_lead_to_the_same_files_from_another_folder(course):
    text = read(course).cells[0].source
    assert f"(../{PAGE}/README.md)" in text and "(../lessons/README.md#rank)" in text
    assert f"(../{PAGE}/one.png)" in text
    assert "(https://example.org)" in text and "(#end)" in text
    places = {f"{PAGE}/README.md": "my-copy/x/a.md"}
    moved = source.relink(SOURCE, PAGE, "my-copy/02-data-parallel", places)
    assert "(../x/a.md)" in moved and "(../../lessons/README.md#rank)" in moved


def test_a_notebook_is_made_checked_and_keeps_its_outputs(course):
    assert "no notebook" in pairs.check([STEM], course)[0]
    pairs.run(STEM, course)
    assert pairs.check([STEM], course) == []
    path = course / "notebooks" / f"{STEM}.ipynb"
    assert nbformat.read(path, 4).cells[4].outputs[0].text == "4 3\n"

    (course / PAGE / f"{STEM}.md").write_text(SOURCE.replace("# A lesson", "# A new lesson"))
    assert "A new lesson" in pairs.check([STEM], course)[0]
    assert pairs.update_text(STEM, course) and pairs.check([STEM], course) == []

    (course / "scripts" / f"{STEM}.py").write_text(SCRIPT.replace("2 * x", "x + x"))
    (finding,) = pairs.check([STEM], course)
    assert "return x + x" in finding
    with pytest.raises(UserError, match="has changed"):
        pairs.update_text(STEM, course)


# ---- claims ---------------------------------------------------------------------------------


CLAIM = {"says": "A | B", "holds": "only here", "because": "1.78× with 2 ranks", "when": True}


def test_a_claim_whose_condition_is_false_is_an_error():
    with pytest.raises(lesson.ClaimFails, match=r"A \| B.*only here"):
        lesson.claim(**CLAIM | {"when": False})


def test_claims_are_collected_from_stored_outputs(course):
    cell = f"""
```python
from multigpu.lesson import claim
claim(**{CLAIM})
```
"""
    assert claims.check(course) == [], "without claims there is no page"
    (course / PAGE / f"{STEM}.md").write_text(f"{SOURCE}\n## Two GPUs?\n{cell}")
    pairs.run(STEM, course)
    assert claims.check(course)
    assert claims.write(course) and claims.check(course) == [] and not claims.write(course)
    (row,) = [
        line for line in (course / claims.PAGE).read_text().splitlines() if "1.78×" in line
    ]
    assert "A \\| B" in row and "Only here: 1.78× with 2 ranks" in row
    assert f"(../notebooks/{STEM}.ipynb#Two-GPUs?)" in row and "In \\[5\\]" in row
