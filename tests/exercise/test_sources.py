"""Which cells a student's process runs."""

import pytest

from multigpu.errors import UserError
from multigpu.exercise.sources import Sources, answer_of, from_history, is_given, needs_of

SHARD = "# answer: shard\ndef shard(): ..."
EVALUATE = "# answer: evaluate (needs shard)\ndef evaluate(): ..."


def test_the_first_line_says_what_a_cell_is():
    assert answer_of(SHARD) == "shard"
    assert answer_of(EVALUATE) == "evaluate"
    assert needs_of(EVALUATE) == ["shard"]
    assert is_given("\n# given\nimport torch")
    assert answer_of("x = 1\n# answer: shard") is None
    assert answer_of("# answer: Shard it") is None
    assert not is_given("# given that x is 1, …")


def test_the_last_run_of_a_cell_counts():
    sources = from_history(
        ["", "# given\na = 1", SHARD, "x = 3", SHARD + " # better", EVALUATE]
    )

    cells = sources.of("evaluate")

    assert [text for _, text in cells] == ["# given\na = 1", SHARD + " # better", EVALUATE]


def test_a_given_cell_that_ran_twice_runs_once():
    first, second = "# given\na = 1", "# given\nb = a"

    sources = from_history([first, second, first])

    assert list(sources.given) == [second, first]


def test_in_grading_another_question_has_the_solution():
    sources = Sources(
        [], {"shard": "wrong", "evaluate": "mine"}, {"shard": "right"}, {"evaluate": ["shard"]}
    )

    assert [text for _, text in sources.of("evaluate")] == ["right", "mine"]
    assert [text for _, text in sources.of("shard")] == ["wrong"]


def test_a_missing_answer_says_which_cell_to_run():
    with pytest.raises(UserError, match="# answer: shard"):
        from_history([]).of("shard")
    with pytest.raises(UserError, match=r"evaluate calls shard.*# answer: shard"):
        from_history([EVALUATE]).of("evaluate")
