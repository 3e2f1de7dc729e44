"""The site: Sphinx builds it from the files that GitHub and JupyterLab show (`make site`)."""

import json
import os
import re
import sys
from functools import partial
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from numbers_of_pictures import numbers  # noqa: E402

from multigpu.course import LESSONS  # noqa: E402

project = "Training with many GPUs"
copyright = "the course's authors, BSD-3-Clause"
html_title = project
root_doc = "README"
extensions = ["myst_nb", "sphinx_copybutton"]

# Beside and below the lessons' pages. Exercises are files to download; solutions stay out.
TOOLS = ["lessons/virtual", "lessons/prove", "lessons/routes", "lessons/claims"]
TOOLS += ["lessons/troubles", "lessons/INSTRUCTORS"]
PROJECT = ["benchmarks/README", "CONTRIBUTING", "AGENTS", "CHANGELOG"]
NOTEBOOKS = {
    lesson.slug: [
        f"notebooks/{path.stem}"
        for notebook in lesson.notebooks
        for path in sorted((ROOT / "notebooks").glob(f"{notebook.stem}*.ipynb"))
    ]
    for lesson in LESSONS
}
# A lesson's pages besides its README.md: those that are no notebook's source.
PAGES = {
    lesson.slug: sorted(
        f"lessons/{lesson.slug}/{path.stem}"
        for path in (ROOT / "lessons" / lesson.slug).glob("*.md")
        if path.stem != "README" and not (ROOT / "notebooks" / f"{path.stem}.ipynb").exists()
    )
    for lesson in LESSONS
}
SHOWN = {"README", "lessons/README", *(f"lessons/{lesson.slug}/README" for lesson in LESSONS)}
SHOWN |= {*TOOLS, *PROJECT, *chain(*NOTEBOOKS.values(), *PAGES.values())}
WORDS = set(re.findall(r'<a id="([\w-]+)">', (ROOT / "lessons/README.md").read_text()))
LINK = re.compile(r"\[((?:\\.|[^][\\])*)\]\(([^()\s#:]*\.(?:md|ipynb))(#[^\s()]*)?\)")
include_patterns = [f"{page}{kind}" for page in SHOWN for kind in (".md", ".ipynb")]

nb_execution_mode = "off"  # the outputs are the stored ones
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
# CHANGELOG and claims begin a section with a smaller title.
suppress_warnings = ["myst.header"]

html_theme = "sphinx_book_theme"
html_favicon = "static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["numbers.js", "pictures.js", "troubles.js", "search.js"]
# Pictures that answer a slider, below the still picture of a page.
ANSWERS = {
    "lessons/03-model-parallel/README": "pipeline",
    "lessons/05-ddp-cluster/README": "allreduce",
    "lessons/15-fsdp/README": "zero",
    "lessons/17-mesh/README": "mesh",
}
html_show_sphinx = False
html_theme_options = {
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
}
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True


def contents(pages: list[str], caption: str = "") -> str:
    """A hidden table of contents: Sphinx makes the bar at the left from it."""
    head = ":hidden:\n" + (f":caption: {caption}\n" if caption else "")
    return f"\n```{{toctree}}\n{head}\n" + "\n".join(f"/{page}" for page in pages) + "\n```\n"


def link(page: str, match: re.Match) -> str:
    """A link as Sphinx finds its target: a word, a heading of a notebook, a file."""
    text, path, anchor = match.groups()
    target = Path(os.path.normpath(Path(page).parent / path)).with_suffix("").as_posix()
    if target == "lessons/README" and anchor and anchor[1:] in WORDS:
        return f"[{text}]({anchor})"
    if target not in SHOWN:
        return f"{{download}}`{text} <{path}>`"
    if anchor and path.endswith(".ipynb"):  # JupyterLab's names of headings → MyST's
        anchor = re.sub(r"[^\w#-]", "", anchor.lower())
    return f"[{text}]({path}{anchor or ''})"


def prepare(app, page: str, source: list[str]) -> None:
    """What Sphinx needs and GitHub shows as text: contents, and targets of the glossary."""
    text = source[0]
    if page == "README":
        text += contents(["lessons/README"], "Lessons")
        text += contents([f"lessons/{lesson.slug}/README" for lesson in LESSONS])
        text += contents(TOOLS, "Tools and tables") + contents(PROJECT, "The project")
    for lesson in LESSONS:
        if page == f"lessons/{lesson.slug}/README":
            text += contents(NOTEBOOKS[lesson.slug] + PAGES[lesson.slug])
    if page in ANSWERS:
        still = re.search(r"^!\[.*\n", text, re.M).group()
        place = f'\n<div class="answers" data-picture="{ANSWERS[page]}"></div>\n'
        text = text.replace(still, still + place)
    # A word of the glossary: <a id="rank"></a>**rank** on GitHub, a span with a name here.
    text = re.sub(r'<a id="([\w-]+)"></a>\*\*(.+?)\*\*', r"[**\2**]{#\1}", text)
    source[0] = LINK.sub(partial(link, page), text)


def troubles() -> list[tuple[str, str, str]]:
    """The rows of lessons/troubles.md: symptom, remedy, and the name of their section."""
    rows, section = [], ""
    for line in (ROOT / "lessons/troubles.md").read_text().splitlines():
        if line.startswith("## "):
            section = "#" + re.sub(r"[^\w ]", "", line[3:].lower()).replace(" ", "-")
        elif line.startswith("| ") and not line.startswith("| You see"):
            text = re.sub(r"\*(\w+)\*", r"\1", LINK.sub(r"\1", line))
            cells = text.strip("| ").split(" | ")
            rows.append((*(cell.strip() for cell in cells), section))
    return rows


def finish(app, error: Exception | None) -> None:
    """Write what the scripts of static/ need; the site opens at index.html."""
    if not error:
        texts = {page: app.env.get_doctree(page).astext() for page in app.env.found_docs}
        texts = {
            page: " ".join(re.sub(r"<!--.*?-->", "", text, flags=re.S).split())
            for page, text in texts.items()
        }
        values = {"numbers": numbers(), "troubles": troubles(), "texts": texts}
        for name, value in values.items():
            text = f"const {name.upper()} = {json.dumps(value)};\n"
            Path(app.outdir, "_static", f"{name}.js").write_text(text)
        there = '<meta http-equiv="refresh" content="0; url=README.html">'
        Path(app.outdir, "index.html").write_text(f'{there}<a href="README.html">site</a>')


def setup(app) -> None:
    app.connect("source-read", prepare)
    app.connect("build-finished", finish)
