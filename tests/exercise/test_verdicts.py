"""What a comparison says."""

import math

import pytest
import torch

from multigpu.exercise.verdicts import MAX_TEXT, difference, shown

SAME = [
    (1, 1.0),
    ([1, 2], (1, 2)),
    (torch.tensor([1.0, 2.0]), [1, 2]),
    (torch.tensor(3), 3.0),
    ({"a": [1]}, {"a": (1,)}),
    (math.nan, math.nan),
    (math.inf, math.inf),
    ("x", "x"),
    (None, None),
    (torch.zeros(0), []),
]
DIFFERENT = [
    (1, 2, ["1", "2"]),
    (True, 1, ["number", "True"]),
    ("1", 1, ["number", "'1'"]),
    (None, 1, ["None"]),
    (1, None, ["None", "1"]),
    ([1, 2], [1], ["1 items", "got 2"]),
    ([1, [2, 3]], [1, [2, 4]], ["item 1", "3", "4"]),
    (5, [5], ["list"]),
    ({"a": 1}, {"b": 1}, ["'b'"]),
    ({"a": 1, "b": 2}, {"a": 1}, ["'b'", "too much"]),
    (torch.zeros(2, 3), torch.zeros(3, 2), ["(3, 2)", "(2, 3)"]),
    (torch.tensor([1.0, 2.5]), [1, 2], ["1 of 2", "value 1", "2.5"]),
    (torch.tensor([math.nan]), [1], ["nan"]),
    ("text", torch.zeros(2), ["'text'"]),
    ([1, [2]], torch.zeros(2), ["[1, [2]]"]),
]


@pytest.mark.parametrize(("got", "expected"), SAME, ids=repr)
def test_what_is_the_same_is_right(got, expected):
    assert difference(got, expected) == ""


@pytest.mark.parametrize(("got", "expected", "words"), DIFFERENT, ids=repr)
def test_a_difference_is_named(got, expected, words):
    text = difference(got, expected, rtol=1e-6)

    assert text
    for word in words:
        assert word in text


def test_the_tolerance_is_absolute_plus_relative():
    assert difference(102.0, 100.0, rtol=0.01, atol=1.0) == ""
    assert difference(102.1, 100.0, rtol=0.01, atol=1.0)
    assert difference(torch.tensor(102.1), 100.0, rtol=0.01, atol=1.0)
    assert difference(math.nan, 100.0, rtol=math.inf)


def test_a_small_element_has_the_rounding_of_large_ones():
    """A right gradient of lesson 16, in 32 bit on four ranks: 2e-6 beside one process's."""
    expected = torch.tensor([0.5, 0.00798327, -0.3])
    got = torch.tensor([0.5, 0.00798523, -0.3])
    assert difference(got, expected, rtol=1e-4, atol=1e-6) == ""
    assert difference(got + 1e-4, expected, rtol=1e-4, atol=1e-6)
    assert difference(torch.tensor([10**6, 3]), torch.tensor([10**6, 4]), rtol=1e-5)


def test_a_value_is_shown_short():
    assert shown(torch.zeros(4, 5)).startswith("a tensor of shape (4, 5)")
    assert shown(0.1 + 0.2) == "0.3"
    assert len(shown("x" * 10_000)) <= MAX_TEXT + 1
    assert "\n" not in shown("two\nlines")
