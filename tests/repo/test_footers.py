"""`multigpu notebooks footers` writes footers and tables; the glossary has its anchors."""

import json
import re
import shutil

import pytest
from commands import ROOT

from multigpu.course import LESSONS
from multigpu.notebooks import footers


def test_footers_and_tables_are_up_to_date():
    stale = [str(path) for path, text in footers.expected(ROOT) if path.read_text() != text]
    assert stale == [], "multigpu notebooks footers"


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.slug)
def test_a_page_has_its_lessons_title_and_time(lesson):
    text = (ROOT / "lessons" / lesson.slug / "README.md").read_text()
    assert text.startswith(f"# {lesson.number} · {lesson.title}\n")
    assert re.search(rf"\b{lesson.minutes} minutes", text.partition("\n## ")[0])


def test_every_lesson_and_every_script_is_in_the_table():
    slugs = {path.parent.name for path in (ROOT / "lessons").glob("*/README.md")}
    assert slugs == {lesson.slug for lesson in LESSONS}
    stems = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert stems == {one.stem for lesson in LESSONS for one in lesson.notebooks}
    numbers = [lesson.number for lesson in LESSONS]
    assert numbers == sorted(numbers) and len(set(numbers)) == len(numbers)


def test_every_notebook_links_to_its_page_and_its_neighbours():
    stems = [one.stem for lesson in LESSONS for one in lesson.notebooks]
    for lesson in LESSONS:
        for one in lesson.notebooks:
            notebook = json.loads((ROOT / "notebooks" / f"{one.stem}.ipynb").read_text())
            footer = "".join(notebook["cells"][-1]["source"])
            assert f"../lessons/{lesson.slug}/README.md" in footer
            place = stems.index(one.stem)
            for other in stems[max(0, place - 1) : place] + stems[place + 1 : place + 2]:
                assert f"({other}.ipynb)" in footer


def test_a_link_has_the_name_that_the_syllabus_has():
    syllabus = (ROOT / "lessons" / "README.md").read_text()
    for lesson in LESSONS:
        assert f"[{lesson.title}]({lesson.slug}/README.md)" in syllabus
        footer = (ROOT / "lessons" / lesson.slug / "README.md").read_text().splitlines()[-1]
        for other in re.findall(r"\[(?:← )?(\d\d .*?)(?: →)?\]", footer):
            assert other in [f"{one.number} {one.title}" for one in LESSONS]
        for one in lesson.notebooks:
            assert f"[{one.name}](../notebooks/{one.stem}.ipynb)" in syllabus


def test_every_notebook_says_after_its_title_how_to_run_it():
    for lesson in LESSONS:
        for one in lesson.notebooks:
            path = ROOT / "notebooks" / f"{one.stem}.ipynb"
            texts = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
            assert texts[0].startswith(f"# {lesson.number}"), path.stem
            assert sum("Shift+Enter" in text for text in texts[:2]) == 1, path.stem
            assert not any("Shift+Enter" in text for text in texts[2:])
            assert "source_hidden" not in path.read_text(), "nothing is folded"


@pytest.fixture
def course(tmp_path):
    """What has footers, copied."""
    for name in ("lessons", "scripts", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.png"))
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_a_lost_footer_and_a_changed_table_are_written_again(course):
    page = course / "lessons" / "02-data-parallel" / "README.md"
    syllabus = course / "lessons" / "README.md"
    texts = {path: path.read_text() for path in (page, syllabus)}
    page.write_text(texts[page].partition("\n<!-- footer")[0])
    syllabus.write_text(texts[syllabus].replace("30 min", "31 min"))
    changed = footers.write(course)
    assert set(changed) == {str(path.relative_to(course)) for path in texts}
    for path, text in texts.items():
        assert path.read_text() == text
    assert footers.write(course) == []


# ---- the glossary ---------------------------------------------------------------------------

ENTRY = re.compile(r'- <a id="([a-z0-9_-]+)"></a>\*\*(.+?)\*\*: (.+)')


def glossary() -> dict[str, tuple[str, str]]:
    """The words that the syllabus explains: anchor → word and sentence."""
    words = (ROOT / "lessons" / "README.md").read_text().partition("\n## Words\n")[2]
    lines = [line for line in words.splitlines() if line.startswith("- ")]
    entries = [ENTRY.fullmatch(line).groups() for line in lines]
    assert len({anchor for anchor, *_ in entries}) == len(entries)
    return {anchor: (word, sentence) for anchor, word, sentence in entries}


def test_each_word_has_its_anchor_and_one_sentence():
    assert len(glossary()) > 40
    for anchor, (word, sentence) in glossary().items():
        assert anchor == word.lower().replace(" ", "-")
        assert sentence.endswith(".") and ". " not in sentence, word


def test_every_link_to_a_word_leads_to_it_and_every_word_has_one():
    files = [*ROOT.glob("lessons/**/*.md"), *ROOT.glob("scripts/*.py"), ROOT / "README.md"]
    link = re.compile(r"\]\((?:\.\./|lessons/)*README\.md#([^)]+)\)")
    linked = [(path, word) for path in files for word in link.findall(path.read_text())]
    for path, word in linked:
        assert word == "words" or word in glossary(), f"{path.name} links to #{word}"
    assert set(glossary()) - {word for _, word in linked} == set()
