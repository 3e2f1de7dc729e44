"""Checks: they call a student's functions, and print the same verdicts everywhere."""

import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from multigpu.errors import Interrupted, UserError
from multigpu.exercise import Exercise
from multigpu.exercise import exercise as module
from multigpu.exercise.exercise import Grading, grade_with
from multigpu.exercise.sources import Sources

pytestmark = pytest.mark.slow
GIVEN = """# given
import torch
import torch.distributed as dist
from multigpu.exercise import gate

def given(x):
    return x / 0

def mean_of(x, scale=1.0):
    mean = torch.mul(sum([f(x), f(x)]) / 2, scale)
    return float(add_nothing(mean) + NOTHING + KEPT.more) * Kept().factor()

FACTORS = {"one": [1.0]}
NOTHING = torch.zeros(())

def plus(amounts):
    def add(value, depth=0):
        return add(value, depth + 1) if depth < 2 else value + sum(amounts)
    return add

add_nothing = plus([0.0])

class Kept:
    def __init__(self):
        self.more = 0.0

    def factor(self):
        import operator
        return operator.pos(FACTORS["one"][0])

KEPT = Kept()
"""

UNSPEAKABLE = """
class Unspeakable(Exception):
    def __str__(self):
        return 1 / 0

def f(x):
    raise Unspeakable
"""


@pytest.fixture(autouse=True)
def after() -> Iterator[None]:
    yield
    grade_with(None)


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    yield
    for worker in module._workers.values():
        worker.close()
    module._workers.clear()


def exercise(answer: str, secret: str = "secret", **options) -> Exercise:
    """An exercise with one answer, named f."""
    grade_with(Grading(Sources([GIVEN], {"f": answer}), secret, None))
    return Exercise("01-one-gpu", **options)


def test_verdicts_are_printed_right_and_wrong(capsys):
    with exercise("def f(x): return x + 1").check("f", "adds", points=1) as student:
        student.equal(student.call("f", 1), 2, "f adds 1")
        student.equal(student.call("f", 1), 3, "f adds 2")
        student.expect(False, "the loss falls", "it stays at 2.3")

    assert capsys.readouterr().out.splitlines() == [
        "right: f adds 1",
        "wrong: f adds 2: expected 3, got 2",
        "wrong: the loss falls: it stays at 2.3",
    ]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("def f(x):\n    return 1 / 0", ["f, line 2: return 1 / 0", "ZeroDivisionError"]),
        ("def f(x:", ["SyntaxError"]),
        ("g = 1", ["does not define f"]),
        ("def f(x): return object()", ["NotPlain"]),
        ("def f(x): return torch.eye(2).to_sparse()", ["NotPlain", "sparse"]),
        (UNSPEAKABLE, ["Unspeakable", "__str__", "ZeroDivisionError"]),
        ("def f(x): return 'a\\nright: f adds 1'", [r"\n"]),
        ("def f(x): raise ValueError('a\\nright: f adds 1')", ["a right: f adds 1"]),
        ("raise NotImplementedError()", ["no answer yet"]),
        ("def f(x): raise NotImplementedError()", ["no answer yet"]),
        ("def f(x):\n    return given(x)", ["f, line 2: return given(x)", "ZeroDivision"]),
    ],
)
def test_what_goes_wrong_is_one_wrong_verdict(capsys, answer, words):
    with exercise(answer).check("f", "adds", points=1) as student:
        student.equal(student.call("f", 1), 2, "f adds 1")

    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("wrong: ")
    for word in words:
        assert word in line


def test_a_value_that_the_check_does_not_expect_is_wrong(capsys):
    with exercise("def f(x): return 'text'").check("f", "adds", points=1) as student:
        student.expect(student.call("f", 1)["total"] > 2, "the total is above 2")

    assert capsys.readouterr().out.startswith("wrong: ")


def verdict_of_guess(answer, capsys, **how):
    """The line that a prediction gets; the experiment gives 12."""
    how = {"within": 1} | how
    with exercise(f"guess = {answer}").check("f", "guess", points=1) as student:
        student.guess("guess", 12, "this is the size", "how many rows are there?", **how)
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "change",
    [
        "def mean_of(x): return 7.0",
        "mean_of.__code__ = (lambda x, scale=1: 7.0).__code__",
        "mean_of.__defaults__ = (7.0,)",
        "mean_of.__globals__['sum'] = lambda values: 14.0",
        "sum = lambda values: 14.0",
        "torch = None",
        "class Kept:\n    def factor(self): return 7.0",
        "Kept.factor.__globals__['Kept'] = None",
        "dict.update(Kept.factor.__globals__, torch=None)",
        "Kept.factor.__globals__['__builtins__']['sum'] = lambda values: 14.0",
        "FACTORS['one'][0] = 7.0",
        "import sys; sys.modules['operator'] = sys",
        "NOTHING.fill_(7.0)",
        "KEPT.more = 7.0",
        "add_nothing.__closure__[0].cell_contents = None",
        "add_nothing.__closure__[1].cell_contents[0] = 7.0",
    ],
)
def test_what_is_given_stays_as_it_is_for_the_checks(capsys, change):
    with exercise(f"{change}\ndef f(x):\n    return 1").check("f", "t", points=1) as student:
        student.equal(student.call("mean_of", 1), 1, "it is 1")
    assert capsys.readouterr().out == "right: it is 1\n"


@pytest.mark.parametrize(
    "change",
    [
        "import builtins; builtins.sum = lambda values: 14.0",
        "torch.mul = lambda value, scale: 7.0",
        "setattr(torch.nn.functional, 'linear', None)",
        "del torch.mul",
        "vars(torch)['mul'] = None",
        "Kept.factor = lambda self: 7.0",
        "type.__setattr__(Kept, 'factor', lambda self: 7.0)",
        "Kept.factor.__code__ = (lambda self: 7.0).__code__",
        "Kept.factor.__defaults__ = (7.0,)",
        "del type(torch).__setattr__",
        "import operator; operator.pos = lambda value: 7.0",
        "type(Kept.factor.__globals__).__getitem__ = None",
        "import sys; sys.settrace(lambda *all: None)",
        "import sys; sys.setprofile(lambda *all: None)",
    ],
)
def test_an_answer_cannot_set_what_the_checks_rely_on(capsys, change):
    with exercise(f"{change}\ndef f(x):\n    return 1").check("f", "t", points=1) as student:
        student.equal(student.call("mean_of", 1), 1, "it is 1")
    said = capsys.readouterr().out
    assert re.search("(Attribute|Type)Error", said)
    assert "right" not in said


def test_the_names_of_a_module_can_be_listed(capsys):
    with exercise("def f(x):\n    return 'mul' in dir(torch)").check(
        "f", "t", points=1
    ) as student:
        student.equal(student.call("f", 1), True, "it lists torch's")
    assert "wrong" not in capsys.readouterr().out


def test_a_given_function_and_the_answer_see_each_other(capsys):
    answer = "def f(x):\n    return 2 if isinstance(x, Kept) else mean_of(Kept())"
    with exercise(answer).check("f", "t", points=1) as student:
        student.equal(student.call("f", 1), 2, "it is 2")
        student.equal(student.call("mean_of", 1), 2, "it is 2, by way of the given function")
    assert "wrong" not in capsys.readouterr().out


def test_memory_that_a_check_lacks_is_a_wrong_verdict(capsys):
    """An answer decides on the size of what it returns."""
    with exercise("def f(x):\n    return x").check("f", "t", points=1) as student:
        student.call("f", 1)
        raise MemoryError
    assert (
        "wrong: the code returned something unexpected: MemoryError" in capsys.readouterr().out
    )


@pytest.mark.parametrize("answer", ["11", "12.5", "13", "11 + True", "torch.tensor(12)"])
def test_a_guess_within_the_distance_is_right(capsys, answer):
    assert verdict_of_guess(answer, capsys) == "right: this is the size"


@pytest.mark.parametrize("answer", ["10.9", "13.1", "-12", "float('nan')", "10 ** 300"])
def test_a_wrong_guess_gets_the_hint_and_not_the_number(capsys, answer):
    said = verdict_of_guess(answer, capsys)
    assert said == "wrong: guess is another number: how many rows are there?"


@pytest.mark.parametrize("answer", ["'12'", "True", "[12]"])
@pytest.mark.parametrize(("unit", "asked"), [("MiB", "a number, in MiB;"), ("", "a number;")])
def test_a_guess_that_is_no_number_is_asked_for_one(capsys, answer, unit, asked):
    said = verdict_of_guess(answer, capsys, unit=unit)
    assert said == f"wrong: this is the size: guess must be {asked} it is {answer}"


def test_a_guess_of_none_is_no_answer_yet(capsys):
    assert "no answer yet" in verdict_of_guess("None", capsys)


def test_an_interrupted_check_gives_no_verdict_and_no_traceback(capsys):
    with (
        pytest.raises(Interrupted, match="no verdict") as caught,
        exercise("f = 1").check("f", "guess", points=1),
    ):
        raise KeyboardInterrupt

    assert len(caught.value._render_traceback_()) == 1
    assert capsys.readouterr().out == ""


def test_the_summary_has_the_points_of_the_checks_that_ran(capsys):
    subject = exercise("f = 1")
    for title, points, expected in (("a", 2, 1), ("b", 3, 2)):
        with subject.check("f", title, points=points) as student:
            student.equal(student.value("f"), expected, title)
    capsys.readouterr()

    subject.summary()

    printed = capsys.readouterr().out
    assert "f: 2 of 5 points" in printed and "hidden" in printed


def test_a_check_without_a_statement_is_wrong(capsys):
    with exercise("def f(x): pass").check("f", "adds", points=1) as student:
        student.call("f", 1)

    assert "no statement" in capsys.readouterr().out


def test_each_check_has_a_process_of_its_own(capsys):
    subject = exercise("calls = []\ndef f(x):\n    calls.append(x)\n    return len(calls)")
    for _ in range(2):
        with subject.check("f", "counts", points=1) as student:
            student.equal([student.call("f", 1), student.call("f", 1)], [1, 2], "f counts")

    assert capsys.readouterr().out == "right: f counts\n" * 2


def test_what_the_student_prints_is_kept_apart_in_grading(capsys):
    subject = exercise("def f(x): print('hello'); return 1")
    with subject.check("f", "prints", points=1) as student:
        student.equal(student.call("f", 1), 1, "f is 1")

    assert capsys.readouterr().out == "right: f is 1\n"
    [record] = subject._grading.record
    assert (record["right"], record["printed"], record["starved"]) == (True, "hello\n", False)


def test_a_time_is_in_the_record_also_above_the_limit(capsys):
    subject = exercise("def f(x): return x")
    for title, seconds in (("slow", 2.5), ("fast", 1.5)):
        with subject.check("f", title, points=1) as student:
            student.takes(student.call("f", seconds), 2, "a step")
    with subject.check("f", "no time", points=1) as student:
        student.equal(student.call("f", 1), 1, "f is 1")

    slow, fast, none = subject._grading.record
    assert (slow["right"], slow["seconds"]) == (False, 2.5)
    assert (fast["right"], fast["seconds"], none["seconds"]) == (True, 1.5, None)
    assert capsys.readouterr().out.splitlines()[:2] == [
        "wrong: a step takes at most 2 s: it takes 2.5000 s",
        "right: a step takes at most 2 s",
    ]


def test_what_the_student_prints_in_a_hidden_check_is_not_kept(capsys):
    subject = exercise("def f(x): print(x); return 1")
    with subject.check("f", "prints", points=1, hidden=True) as student:
        student.equal(student.call("f", 4711), 1, "f is 1")

    assert "4711" not in str(subject._grading.record) + capsys.readouterr().out


def drawn(secret: str, hidden: bool) -> list:
    with exercise("", secret).check("f", "draws", points=1, hidden=hidden) as student:
        student.expect(True, "drawn")
        return [student.random.random(), torch.rand(2, generator=student.generator).tolist()]


def test_only_hidden_checks_depend_on_the_secret(capsys):
    assert drawn("a", hidden=False) == drawn("b", hidden=False)
    assert drawn("a", hidden=True) == drawn("a", hidden=True)
    assert drawn("a", hidden=True) != drawn("b", hidden=True)
    assert drawn("a", hidden=True) != drawn("a", hidden=False)


def test_the_time_of_a_check_and_of_a_question_is_limited(capsys):
    subject = exercise("def f(x):\n    while True: pass", seconds=0.5)
    for number in range(4):
        with subject.check("f", f"ends {number}", points=1) as student:
            student.equal(student.call("f", 1), 2, "f ends")

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all("Timeout" in line for line in lines)
    assert "0.1 s" in lines[-1], "the question's time is over"


def test_in_a_notebook_a_question_has_no_time_of_its_own(capsys, monkeypatch):
    monkeypatch.setattr(module, "QUESTION_CHECKS", 0)
    cells = ["", "# answer: f\nimport time\ndef f(x): time.sleep(x)"]
    shell = SimpleNamespace(user_ns={"In": cells})
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    grade_with(None)
    with Exercise("01-one-gpu").check("f", "sleeps", points=1) as student:
        student.equal(student.call("f", 0.5), None, "f sleeps")

    assert capsys.readouterr().out == "right: f sleeps\n"


@pytest.mark.parametrize("wait", ["time.sleep(60)", "raise TimeoutError('not yet')"])
def test_in_a_notebook_each_timeout_is_printed(wait, capsys, monkeypatch):
    cells = ["", f"# answer: f\nimport time\ndef f(x): {wait}"]
    shell = SimpleNamespace(user_ns={"In": cells})
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    grade_with(None)
    tried = Exercise("01-one-gpu", seconds=1)
    for title in ("first", "second"):
        with tried.check("f", title, points=1) as student:
            student.call("f", 1)
        assert "Timeout" in capsys.readouterr().out


# ---- ranks ----------------------------------------------------------------------------------

DDP = """
def f(rank):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
    model(torch.full((4, 3), float(rank))).sum().backward()
    return model.module.weight.grad
"""


def test_ddp_works_and_is_recorded(capsys):
    with exercise(DDP).check("f", "ddp", points=1) as student:
        run = student.ranks("f", [[rank] for rank in range(3)])
        student.close_to(run.values, [torch.full((2, 3), 4.0)] * 3, "the gradient is the mean")
        sums = [call for call in run.calls[0] if call.kind == "all_reduce"]
        student.equal([call.bytes for call in sums], [24], "one all_reduce of 6 floats")

    assert capsys.readouterr().out.count("right: ") == 2


def test_a_reduce_and_a_broadcast_are_an_all_reduce(capsys):
    answer = "def f(x):\n    dist.reduce(x, 1)\n    dist.broadcast(x, 1)\n    return x"
    with exercise(answer).check("f", "ranks", points=1) as student:
        run = student.ranks("f", [[torch.tensor([rank + 1.0])] for rank in range(3)])
        student.close_to(run.values, [[6.0]] * 3, "all have the sum")
        student.equal([call.kind for call in run.calls[0]], ["reduce", "broadcast"], "calls")

    assert capsys.readouterr().out == "right: all have the sum\nright: calls\n"


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        # Without the error, both pairs' tensors would be one sum of four.
        (
            "groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]\n"
            "    dist.all_reduce(x, group=groups[dist.get_rank() // 2])",
            "a group of 2 of the 4 ranks is not known here",
        ),
        ("dist.all_to_all_single(torch.empty(4), x)", "all-to-all is not known here"),
    ],
)
def test_what_the_network_of_the_checks_lacks_is_a_sentence(capsys, statement, words):
    answer = f"def f(x):\n    {statement}\n    return x"
    with exercise(answer).check("f", "ranks", points=1) as student:
        student.ranks("f", [[torch.ones(4)]] * 4)

    [line] = capsys.readouterr().out.splitlines()
    assert words in line


def test_a_collective_that_would_hang_is_a_sentence(capsys):
    answer = "def f(x):\n    if dist.get_rank() == 0: dist.all_reduce(x)\n    return x"
    with exercise(answer).check("f", "ranks", points=1) as student:
        student.ranks("f", [[torch.ones(1)]] * 2)

    [line] = capsys.readouterr().out.splitlines()
    assert "rank 1 has returned without calling it" in line
    assert "all_reduce" in line


def test_ranks_that_wait_for_each_other_are_named(capsys):
    answer = "def f(x):\n    dist.recv(x, 1 - dist.get_rank())"
    with exercise(answer, seconds=1).check("f", "ranks", points=1) as student:
        student.ranks("f", [[torch.ones(1)]] * 2)

    [line] = capsys.readouterr().out.splitlines()
    assert "waits in recv from rank" in line and "hangs" in line


def test_the_rank_that_failed_is_named_not_those_that_waited(capsys):
    answer = (
        "def f(x):\n    if dist.get_rank() == 1: raise ValueError('mine')\n    dist.barrier()"
    )
    with exercise(answer).check("f", "ranks", points=1) as student:
        student.ranks("f", [[0]] * 3)

    assert "ValueError: mine" in capsys.readouterr().out


def test_a_rank_that_fails_ends_the_others_at_once(capsys):
    answer = (
        "def f(rank):\n"
        "    if rank == 4: raise ValueError('mine')\n"
        "    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))"
    )
    subject = exercise(answer)
    for number in range(5):
        with subject.check("f", f"ranks {number}", points=1) as student:
            student.ranks("f", [[rank] for rank in range(5)])

    assert capsys.readouterr().out.count("ValueError: mine") == 5


def test_an_output_of_a_wrong_size_is_an_error_of_that_rank(capsys):
    answer = (
        "def f(x):\n"
        "    parts = [torch.zeros(3) for _ in range(2)]\n"
        "    dist.all_gather(parts, x)\n"
        "    return parts"
    )
    with exercise(answer).check("f", "ranks", points=1) as student:
        student.ranks("f", [[torch.ones(2)]] * 2)

    [line] = capsys.readouterr().out.splitlines()
    assert "size" in line and "Timeout" not in line


GATES = """
def f(x, overlap):
    first = torch.nn.Parameter(torch.ones(2))
    second = torch.nn.Parameter(torch.ones(2))
    works = []
    def send(parameter):
        works.append(dist.all_reduce(parameter.grad, async_op=True))
    if overlap:
        first.register_post_accumulate_grad_hook(send)
        second.register_post_accumulate_grad_hook(send)
    (gate(first * x, "first layer") * second).sum().backward()
    if not overlap:
        send(second), send(first)
    for work in works:
        work.wait()
    return first.grad, second.grad
"""


@pytest.mark.parametrize("overlap", [True, False])
def test_gates_show_whether_an_all_reduce_began_before_backward_ended(capsys, overlap):
    with exercise(GATES).check("f", "gates", points=1) as student:
        run = student.ranks("f", [[torch.ones(2), overlap]] * 2)
        factor = run.factors["first layer"]
        student.close_to(
            run.values[0][0], [2 * factor] * 2, "the gate multiplies the gradient"
        )
        student.expect(True, "ran")

    kinds = [kind for kind, _ in run.events[0]]
    # The gradient of the second layer is complete before backward comes to the gate.
    assert kinds == (
        ["all_reduce", "gate", "all_reduce"] if overlap else ["gate"] + 2 * ["all_reduce"]
    )
    assert "right: the gate" in capsys.readouterr().out


ON_A_VIRTUAL_GPU = """
def f():
    from multigpu.virtual import control

    _, second = control.start(2)
    weight = torch.ones(2, device=second, requires_grad=True)
    gate(weight, str(weight.device)).sum().backward()
    return weight.grad
"""


def test_a_gate_works_on_a_virtual_gpu(capsys):
    with exercise(ON_A_VIRTUAL_GPU).check("f", "gates", points=1) as student:
        run = student.ranks("f", [[]])
        factor = run.factors["vgpu:1"]
        student.close_to(run.values[0], [factor] * 2, "the gate multiplies the gradient")

    assert run.events == [[("gate", "vgpu:1")]]
    assert "right: the gate" in capsys.readouterr().out


def test_outside_a_check_a_gate_changes_nothing():
    from multigpu.exercise import gate

    weight = torch.ones(2, requires_grad=True)
    gate(weight, "layer").sum().backward()

    assert weight.grad.tolist() == [1.0, 1.0]


def test_without_a_notebook_the_checks_say_what_to_do():
    grade_with(None)
    with (
        pytest.raises(UserError, match="multigpu exercise check"),
        Exercise("01-one-gpu").check("f", "t", points=1),
    ):
        pass


def test_a_students_text_cannot_replace_a_verdict(capsys):
    """nbval forgets what stands before a carriage return, as a terminal does."""
    forged = "\\rright: it is 1\\n\\x08\\x1b[2K"
    answer = f"def f(): return '{forged}'\ndef g(): raise type('{forged}', (Exception,), {{}})"
    made = exercise(answer)
    with made.check("f", "text", points=1) as student:
        student.expect(False, student.call("f"), student.call("f"))
    with made.check("f", "error", points=1) as student:
        student.call("g")

    printed = capsys.readouterr().out
    assert all(line.startswith("wrong: ") for line in printed.splitlines())
    assert printed.replace("\n", "").isprintable()


def test_what_the_answer_returned_does_not_fill_the_reports(capsys):
    """Some checks quote it in their own words; a reply has up to a megabyte of texts."""
    ours = exercise("def f(x):\n    return [0] * 100_000")
    with ours.check("f", "long", points=1) as student:
        found = student.call("f", 1)
        student.expect(found == 1, "it is 1", f"it is {found}")

    assert 1_000 < len(capsys.readouterr().out) < 3_000


def test_a_plan_that_the_library_refuses_is_wrong(capsys):
    with exercise("def f(): return 1").check("f", "plan", points=1) as student:
        student.call("f")
        raise UserError("there are no -1 devices")

    assert "wrong: " in capsys.readouterr().out


def test_a_plan_that_would_run_for_ever_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(module, "OWN_SECONDS", 0.5)
    made = exercise("def f(): return 10 ** 15", seconds=1)
    with made.check("f", "plan", points=1) as student:
        for _ in range(student.call("f")):
            pass

    assert "did not end" in capsys.readouterr().out
