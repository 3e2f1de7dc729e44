"""Feedback, statistics, what regrading changed, all in a folder."""

import codecs
import html.parser
import random

import pytest
from graded import question, result

from multigpu.errors import UserError
from multigpu.grading import feedback, question_statistics, regrade, reports, summary
from multigpu.grading.results import Note
from multigpu.grading.times import Standing

NONE = Standing([], "key")

EVIL = (
    "</pre><script>alert(1)</script><img src=x onerror=alert(1)>"
    "\"'&amp;\x00\x1b[31m\ud800\ufffe\u202e"
)


def random_text(chance):
    ranges = [
        (0, 32),
        (32, 127),
        (127, 160),
        (0x2028, 0x2030),
        (0xD800, 0xE000),
        (0xFFFE, 0x10000),
    ]
    return "".join(
        chr(chance.randrange(*chance.choice(ranges))) for _ in range(chance.randrange(30))
    )


class Page(html.parser.HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def test_a_page_of_feedback():
    first = question(
        "first", "rw", "w", printed="rank 0: hello", notes=["there are two cells"]
    )
    anna = result("anna", first, question("second", "b"), notes=[Note("an older file")])
    text = Page(feedback.page(anna, "05-ddp-cluster", "DDP", NONE)).text
    for said in (
        "first: line of check 2",
        "rank 0: hello",
        "there are two cells",
        "an older file",
        "return sum(values)",
        "2 / 6",
        "– / 8",
    ):
        assert said in text
    assert "line of check 3" not in text, "a hidden check's line"
    assert "second: line" not in text, "why the machine could not grade it"


def test_a_hidden_check_shows_its_title_and_verdict_alone():
    for status in "rwb":
        hidden = question("first", "r", status)
        hidden.parts[1].lines = ["SECRET of the check", "SECRET seed 7"]
        [one] = [result("anna", hidden)]
        text = feedback.page(one, "05", "DDP", NONE)
        assert "SECRET" not in text
        assert "check 2" in text
        word = {"r": "right", "w": "wrong", "b": "not graded"}[status]
        assert text.count(f'class="verdict {hidden.parts[1].status}"') >= 1
        assert word in text


def test_a_blank_answer_is_named_once_per_check():
    [one] = [result("anna", question("first", "w", "w", answer="", blank=True))]
    text = Page(feedback.page(one, "05", "DDP", NONE)).text
    assert text.count("no answer") == 2
    assert "line of check" not in text
    assert "Your answer" not in text


def test_no_text_becomes_markup():
    plain = question("first", "w", "w", printed="x", notes=["x"], answer="x")
    one = result("x", plain, notes=[Note("x")])
    expected = Page(feedback.page(one, "x", "x", NONE))
    chance = random.Random(0)
    for text in [EVIL, *(random_text(chance) + "<b onclick='x'>&lt;" for _ in range(200))]:
        bad = question("first", "w", "w", printed=f"x{text}", notes=[text], answer=f"x{text}")
        bad.title = text
        for part in bad.parts:
            part.title = text
            part.lines = [text]
        one = result(text, bad, notes=[Note(text)])
        made = Page(feedback.page(one, text, text, NONE))
        assert made.tags == expected.tags
        assert [name for name, _ in made.attributes] == [
            name for name, _ in expected.attributes
        ]
        feedback.page(one, text, text, NONE).encode("utf-8")


def test_a_page_loads_and_runs_nothing():
    [one] = [result("anna", question("first", "w", answer=EVIL))]
    page = Page(feedback.page(one, "05", "DDP", NONE))
    assert not {"script", "img", "link", "iframe", "form", "object"} & set(page.tags)
    assert not {"style", "src", "href", "onclick"} & {name for name, _ in page.attributes}
    policy = next(value for name, value in page.attributes if value and "default-src" in value)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


NAMES = [
    "anna",
    "Anna",
    "ANNA",
    "a/b",
    "a\\b",
    "a b",
    "a-b",
    "..",
    ".",
    "",
    "/etc/passwd",
    "con",
    "NUL",
    "q\"'<b>",
    "x" * 300,
    "x" * 301,
    "李小龙",
    "李小虎",
    "a\nb",
    "\ud800",
    "jane.doe",
    "-rf",
    "~",
]


def test_file_names_are_safe_and_different():
    names = [feedback.page_name(name) for name in NAMES]
    assert len({name.lower() for name in names}) == len(NAMES)
    assert names[0] == "anna.html"
    for name in names:
        assert name.isascii()
        assert len(name) <= 80
        assert not set(name) & set("/\\\"'<>:|?* \n\x00")
        assert not name.startswith((".", "~"))
    cleaned = [feedback.page_name(name) for name in NAMES]
    taken = {name.removesuffix(".html") for name in cleaned if "~" in name}
    assert not taken & {name.removesuffix(".html") for name in map(feedback.page_name, taken)}


def test_pages_of_an_earlier_grading_go(tmp_path):
    marks = [result(name, question("first", "r")) for name in ("anna", "Ben")]
    feedback.write(marks, tmp_path, "05", "DDP", NONE)
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "own.html").write_text("the instructor's own")
    feedback.write(marks[:1], tmp_path, "05", "DDP", NONE)
    assert {path.name for path in tmp_path.iterdir()} == {"anna.html", "own.html"}


def test_the_table_of_statistics():
    marks = [
        result("a", question("first", "rr", "w"), question("long" * 20, "w")),
        result("b", question("first", "rw", "r"), question("long" * 20, "b")),
        result("c", question("first", "ww", "w", blank=True), question("long" * 20, "r")),
        result("d", question("first", "rb", "r"), question("long" * 20, "b")),
        result("e", problem="no notebook"),
    ]
    lines = question_statistics.text(marks).splitlines()
    assert [line.split() for line in lines[:6]] == [
        ["4", "students"],
        [],
        ["question", "/", "check", "right", "wrong", "blank", "blocked", "mean"],
        ["first", "44%"],
        ["check", "1", "3", "0", "1", "0"],
        ["check", "2", "1", "1", "1", "1"],
    ]
    assert lines[6].split() == ["hidden:", "check", "3", "2", "1", "1", "0"]
    assert lines[7].split()[1] == "50%"
    assert max(map(len, lines)) <= 95


@pytest.mark.parametrize("marks", [[], [result("a", question("first", "b"))]])
def test_statistics_without_a_mean(marks):
    assert "%" not in question_statistics.text(marks)


def changes(before, after):
    """The lines of the checks that changed, of one student; the total's line is the last."""
    *inside, total = regrade.lines([before], [after])
    assert "total: " in total
    return inside


def test_what_changed_and_why():
    before = result("anna", question("first", "rw"), question("second", "r"))
    assert regrade.lines([before], [before]) == ["nothing changed"]

    answer = result("anna", question("first", "rr", answer="new"), question("second", "r"))
    [line] = changes(before, answer)
    assert line == "anna: first / check 2: 0 -> 2: the answer changed"

    check = result("anna", question("first", "rr"), question("second", "r"))
    [line] = changes(before, check)
    assert "answer is the same" in line

    points = result("anna", question("first", "rw", points=3.0), question("second", "r"))
    [line] = changes(before, points)
    assert "2 -> 3: the answer is the same: the check, its points" in line

    blocked = result("anna", question("first", "rb"), question("second", "r"))
    [line] = changes(before, blocked)
    assert "0 -> blocked: the machine could not grade it now" in line
    [line] = changes(blocked, before)
    assert "blocked -> 0: the machine could not grade it before" in line


def test_checks_and_students_that_come_and_go():
    before = result("anna", question("first", "rw"))
    [line] = changes(before, result("anna", question("first", "rwr")))
    assert line == "anna: first / check 3: - -> 2: the check is new"
    added = result("anna", question("second", "r"), question("first", "rw"))
    [line] = changes(before, added)
    assert line == "anna: second / check 1: - -> 2: the check is new"
    [line] = changes(added, before)
    assert line == "anna: second / check 1: 2 -> -: the check was removed"
    assert regrade.lines([before], [result("ben", question("first", "r"))]) == [
        "ben: total: 2: a new student",
        "anna: there is no submission any more",
    ]
    unread = result("anna", question("first", "ww"), problem="no notebook")
    [line] = changes(before, unread)
    assert "no notebook" in line


def test_all_reports_in_a_folder(tmp_path):
    marks = [result(name or "x", question("first", "rw", "b")) for name in NAMES]
    reports.write(marks, ["zoe"], tmp_path / "out", "05-ddp-cluster", "DDP", "DDP", "key")
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(written) == 6 + len(NAMES)
    assert all(path.stat().st_size for path in written)
    assert (tmp_path / "out" / "gradebook.csv").read_bytes().startswith(codecs.BOM_UTF8)
    back = reports.read_results(tmp_path / "out" / "results.json")
    assert back == marks
    assert regrade.lines(marks, back) == ["nothing changed"]


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "[{}]", '[{"result": {}}]', "[" * 100_000, None]
)
def test_results_that_cannot_be_read(tmp_path, text):
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=r"results\.json"):
        reports.read_results(path)


def test_the_mean_total_leaves_out_what_was_not_graded(tmp_path):
    marks = [
        result("anna", question("first", "rr")),
        result("ben", question("first", "rw")),
        result("cleo", problem="the file is damaged"),
        result("dana", question("first", "rb")),
    ]
    assert "mean 3 of 4 points" in summary.lines(marks, [], [], tmp_path)[-1]
    assert "mean - of 4 points" in summary.lines(marks[3:], [], [], tmp_path)[-1]


def of_class(seconds):
    """A class's results: each student's time for `plan`, None without a plan."""
    return [
        result(name, question("guess", "r"), question("plan", "rw", seconds=time))
        for name, time in seconds.items()
    ]


def test_the_table_of_times_has_pseudonyms_the_fastest_first(tmp_path):
    marks = of_class({"anna": 3.25, "ben": None, "cleo": 2.861962475112794, "dana": 3.25})
    reports.write(marks, [], tmp_path, "15-fsdp", "FSDP", "FSDP", "key")
    lines = (tmp_path / "times.csv").read_text().splitlines()
    head, *rows = [line.split(",") for line in lines]
    index = (tmp_path / "feedback" / "index.csv").read_text(encoding="utf-8-sig")
    who = {row.split(",")[2]: row.split(",")[0] for row in index.splitlines()}

    assert head == ["question", "seconds", "pseudonym", "points", "out of"]
    assert (who[rows[0][2]], rows[0][1]) == ("cleo", "2.861962")
    assert {who[row[2]] for row in rows[1:]} == {"anna", "dana"}
    assert {tuple(row[3:]) for row in rows} == {("2", "4")}
    assert not [one for one in ("anna", "cleo", "dana") if one in "".join(lines)]
    page = Page((tmp_path / "feedback" / "anna.html").read_text()).text
    (own,) = [row[2] for row in rows if who[row[2]] == "anna"]
    assert "Your time: 3.2500 s, simulated. The best of the class: 2.8620 s." in page
    assert own in page and not [row[2] for row in rows if row[2] != own and row[2] in page]
    assert "Your time" not in Page((tmp_path / "feedback" / "ben.html").read_text()).text


def test_a_pseudonym_needs_the_secret():
    of = {key: Standing([], key).pseudonym("anna") for key in ("key", "other")}
    assert of["key"] == Standing(of_class({"ben": 1.0}), "key").pseudonym("anna")
    assert of["key"] != of["other"]
    assert len({Standing([], "key").pseudonym(f"s{n}") for n in range(5000)}) == 5000


def test_without_times_there_is_no_table(tmp_path):
    reports.write(of_class({"anna": None}), [], tmp_path, "15", "t", "t", "key")
    assert not list(tmp_path.glob("times.*"))


def test_the_index_says_whose_a_page_is(tmp_path):
    marks = [result(name, question("first", "r")) for name in ("anna", "Jane Doe")]
    reports.write(marks, [], tmp_path, "05-ddp-cluster", "05", "05", "key")
    text = (tmp_path / "feedback" / "index.csv").read_text(encoding="utf-8-sig")
    rows = [line.split(",") for line in text.splitlines()]
    assert rows[0] == ["student", "page", "pseudonym"]
    assert rows[1] == ["anna", "anna.html", Standing([], "key").pseudonym("anna")]
    assert rows[2][0] == "Jane Doe"
    assert all((tmp_path / "feedback" / page).is_file() for _, page, _ in rows[1:])
