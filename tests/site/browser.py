"""The site and a report of a run in a real browser: `make test-site` builds and runs this."""

import functools
import http.server
import json
import os
import re
import shutil
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urldefrag

import pytest
from playwright.sync_api import Page, sync_playwright

from multigpu.memory import MODELS
from multigpu.scaling.cluster import network
from multigpu.virtual import page as report_page
from multigpu.virtual.sim.event import Event
from multigpu.virtual.sim.network import collective_seconds
from multigpu.virtual.sim.timeline import Timeline

SITE = Path(__file__).parent.parent.parent / "build" / "site"
PAGES = sorted(
    str(path.relative_to(SITE))
    for path in SITE.rglob("*.html")
    if "_static" not in path.parts
    and path.name not in ("index.html", "genindex.html", "search.html")
)
DESKTOP, TELEPHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
# What a learner types, and a page that the results must name.
WORDS = {
    "all-reduce": "Syllabus",
    "DataParallel": "02 · DataParallel",
    "out of memory": "When it goes wrong",
    "sbatch": "05 · DDP on a cluster",
    "gradient accumulation": "05 · DDP on a cluster",
    "bubble": "03 · Model parallelism",
    "torchrun": "05 · DDP on a cluster",
    "checkpointing": "14 · Where the memory goes",
    "fp16": "11 · Precision",
    "Horovod": "10 · Every strategy",
    "hangs": "18 · Hanging, slow, wrong",
}


# An error, as a learner pastes it, and words of the first result.
MESSAGES = {
    "KeyError: 'LOCAL_RANK'": "started without torchrun",
    "AssertionError: Torch not compiled with CUDA enabled": "multigpu virtual",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two "
    "devices, cuda:0 and cpu!": ".to() is missing",
    "out of memory": "CUDA out of memory",
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words) -> None:
        pass


@pytest.fixture(scope="module")
def address():
    """The site on a port of this machine."""
    handler = functools.partial(Quiet, directory=SITE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert program, "install Chromium (Debian: apt-get install chromium), or set CHROMIUM"
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])


def open_pages(browser, address: str, **options) -> tuple[Page, list[str]]:
    """A tab, and the list to which its errors and its requests to other machines go."""
    page = browser.new_context(**options).new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))

    def message(one) -> None:
        # The theme says so when a page is opened for the first time.
        if one.type == "error" and "Resetting to auto" not in one.text:
            wrong.append(one.text)

    def request(one) -> None:
        if not one.url.startswith((address, "data:", "blob:")):
            wrong.append(f"from outside: {one.url}")

    page.on("console", message)
    page.on("request", request)
    return page, wrong


@pytest.mark.parametrize("size", [DESKTOP, TELEPHONE], ids=["desktop", "telephone"])
def test_each_page_opens_without_an_error_and_is_not_too_wide(browser, address, size):
    page, wrong = open_pages(browser, address, viewport=size)
    for name in PAGES:
        page.goto(address + name)
        assert not wrong, (name, wrong)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], name
        loaded = "[...document.images].filter(one => !one.complete || !one.naturalWidth)"
        page.wait_for_function(f"{loaded}.every(one => one.loading === 'lazy')")
        assert page.evaluate(
            "[...document.images].every(one => one.alt || one.closest('.cell'))"
        )
    assert len(PAGES) >= 50


def test_pages_are_under_a_megabyte():
    sizes = {name: (SITE / name).stat().st_size for name in PAGES}
    assert max(sizes.values()) < 1e6, max(sizes, key=sizes.get)


class Links(HTMLParser):
    """The targets of a page's links, and the names that links can lead to."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.names = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.names.add(given.get("id"))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


def test_links_hold():
    pages = {name: Links(SITE / name) for name in PAGES}
    for name, found in pages.items():
        for link in found.links:
            path, anchor = urldefrag(link)
            if re.match(r"[a-z]+:", link) or link == "#":
                continue
            there = (SITE / name).parent / unquote(path) if path else SITE / name
            assert there.exists(), (name, link)
            target = str(there.resolve().relative_to(SITE.resolve()))
            if anchor and target in pages:
                assert unquote(anchor) in pages[target].names, (name, link)


def test_exercises_can_be_loaded_and_solutions_are_not_there():
    files = [path.name for path in SITE.rglob("*") if path.is_file()]
    assert files.count("exercise.ipynb") == len(list(SITE.glob("lessons/[01]*/README.html")))
    assert not [name for name in files if "solution" in name]


@pytest.mark.parametrize("words", WORDS)
def test_search_finds(browser, address, words):
    page, wrong = open_pages(browser, address, viewport=DESKTOP)
    page.goto(f"{address}search.html?q={words}")
    page.wait_for_selector("#search-results .search-summary:has-text('found')")
    titles = page.locator("#search-results li > a").all_inner_texts()
    assert any(WORDS[words] in title for title in titles), titles
    assert not wrong


@pytest.mark.parametrize("message", MESSAGES)
def test_an_error_message_finds_what_to_do_first(browser, address, message):
    page, wrong = open_pages(browser, address, viewport=DESKTOP)
    page.goto(f"{address}search.html?q={quote(message)}")
    page.wait_for_selector("#search-results .search-summary:has-text('found')")
    first = page.locator("#search-results li").first
    assert MESSAGES[message] in first.inner_text()
    path, anchor = urldefrag(first.locator("a").get_attribute("href"))
    assert anchor in Links(SITE / path).names
    titles = page.locator("#search-results li > a").all_inner_texts()
    assert len(set(titles)) == len(titles) and not wrong


def test_without_a_server_the_results_have_excerpts(browser):
    """And a lesson's page and its notebook have titles of their own."""
    page, wrong = open_pages(browser, "file://", viewport=DESKTOP)
    page.goto(f"file://{SITE}/search.html?q=accumulation")
    page.wait_for_selector("#search-results .search-summary:has-text('found')")
    page.wait_for_function(
        "[...document.querySelectorAll('#search-results li')].every("
        "one => one.querySelector('.context')?.textContent.length > 100)"
    )
    titles = page.locator("#search-results li > a").all_inner_texts()
    assert len(set(titles)) == len(titles) > 5
    assert any(title.endswith("(notebook PT_CNN_MultiGPU)") for title in titles)
    assert not wrong


def test_pictures_stand_on_white_in_dark_mode(browser, address):
    page, _ = open_pages(browser, address, viewport=DESKTOP, color_scheme="dark")
    page.goto(address + "lessons/14-memory/README.html")
    color = "getComputedStyle(document.querySelector(%r)).backgroundColor"
    assert page.evaluate(color % ".bd-content img") == "rgb(255, 255, 255)"
    assert page.evaluate(color % "html") != "rgb(255, 255, 255)"


def with_picture(name: str) -> str:
    """The page that has this picture."""
    return next(
        page for page in PAGES if f'data-picture="{name}"' in (SITE / page).read_text()
    )


@pytest.mark.parametrize("name", ["zero", "pipeline", "mesh", "allreduce"])
def test_a_picture_answers_the_keyboard(browser, address, name):
    page, wrong = open_pages(browser, address, viewport=DESKTOP, reduced_motion="reduce")
    page.goto(address + with_picture(name))
    for slider in page.locator(".answers input").all():
        before = page.locator(".answers svg").inner_html()
        slider.focus()
        page.keyboard.press(
            "ArrowLeft"
            if slider.input_value() == slider.get_attribute("max")
            else "ArrowRight"
        )
        assert page.locator(".answers svg").inner_html() != before
    assert not wrong


def test_without_javascript_the_still_picture_stays(browser, address):
    page, _ = open_pages(browser, address, viewport=DESKTOP, java_script_enabled=False)
    for name in ("zero", "pipeline", "mesh", "allreduce"):
        page.goto(address + with_picture(name))
        assert page.locator(".bd-article img").first.is_visible()
        assert not page.locator(".answers").is_visible()


def test_a_pipelines_length_is_that_of_the_formula(browser, address):
    """GPipe and 1F1B: (micro-batches + stages - 1) forwards and backwards, 3 units each."""
    page, _ = open_pages(browser, address)
    page.goto(address + with_picture("pipeline"))
    for kind in ("GPipe", "1F1B"):
        for stages, batches in ((2, 1), (4, 4), (8, 16), (3, 2)):
            end = page.evaluate(f"schedule({kind!r}, {stages}, {batches}).end")
            assert end == 3 * (batches + stages - 1), (kind, stages, batches)


def test_the_numbers_are_the_librarys():
    text = (SITE / "_static" / "numbers.js").read_text()
    numbers = json.loads(text.removeprefix("const NUMBERS = ").removesuffix(";\n"))
    assert numbers["models"]["gpt-7b"] == MODELS["gpt-7b"].weights
    name = next(one for one in numbers["seconds"] if "A100" in one)
    group = network("NVLink3", "HDR200", 8).group(64)
    seconds = collective_seconds("allreduce", 4**12, group)
    row = numbers["seconds"][name][numbers["ranks"].index(64)]
    assert row[numbers["sizes"].index(4**12)] == pytest.approx(seconds, rel=1e-3)


@pytest.fixture
def report(tmp_path):
    """A page of `multigpu virtual --report` with 100,000 events of 8 GPUs."""
    lanes = [f"rank {rank}, cuda:{rank}" for rank in range(8)]
    events = [
        Event(
            rank,
            "compute",
            "backward" if i % 2 else "forward",
            "mm",
            i * 1e-4,
            i * 1e-4 + 6e-5,
        )
        for rank in range(8)
        for i in range(12_500)
    ]
    timeline = Timeline(events, lanes, 0.0, 1.25, "simulated: 8 × V100-16GB")
    memory = {lanes[0]: [(0.1, 1.0, 2**20, "activations"), (0.0, 1.25, 2**21, "parameters")]}
    path = tmp_path / "r.html"
    capacities = dict.fromkeys(lanes, 2**34)
    path.write_text(report_page.html("train.py", "text", timeline, memory, capacities))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_opens_anywhere_and_answers_mouse_and_keyboard(browser, report, scheme):
    page, wrong = open_pages(browser, "file://", viewport=DESKTOP, color_scheme=scheme)
    page.goto(f"file://{report}")
    assert report.stat().st_size < 10e6
    lanes, said = page.locator("#lanes"), page.locator("#range")
    assert "0 ns to 1.25 s of 1.25 s; 100,000 events" in said.inner_text()
    # All events are shorter than a pixel, and fill 60% of the time: so high are the bars.
    filled = (
        "Array.from({length: WORK}, (_, y) => pen.getImageData(600, AXIS + y, 1, 1).data[2])"
    )
    colors = page.evaluate(filled)
    assert colors[:8] == [colors[0]] * 8 and colors[0] not in colors[12:]
    lanes.focus()
    for key, words in {"+": "313 ms to 938 ms", "ArrowRight": "469 ms to 1.09 s"}.items():
        page.keyboard.press(key)
        page.wait_for_function(
            f"document.querySelector('#range').textContent.includes({words!r})"
        )
    page.keyboard.press("0")
    box = lanes.bounding_box()
    for _ in range(10):
        page.mouse.move(box["x"] + 600, box["y"] + 40)
        page.mouse.wheel(0, -600)
        page.wait_for_timeout(30)
    page.mouse.move(box["x"] + 605, box["y"] + 41)
    page.wait_for_selector("#tip:not([hidden])")
    assert re.search(
        r"mm \((forward|backward)\), stream 0, 60.0 µs from", page.locator("#tip").inner_text()
    )
    page.mouse.move(box["x"] + 600, box["y"] + 100)
    page.wait_for_function(
        "document.querySelector('#tip').textContent.includes('parameters 2.00 MiB')"
    )
    assert not wrong
