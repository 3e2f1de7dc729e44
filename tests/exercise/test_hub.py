"""The network that the checks play: results, records, and calls that would hang."""

import threading

import pytest
import torch

from multigpu.exercise import hub as module
from multigpu.exercise.hub import Hub


class Rank:
    """Sends requests to a hub, and keeps the answers."""

    def __init__(self, hub: Hub, rank: int):
        self.hub = hub
        self.rank = rank
        self.answers: list[dict] = []

    def ask(self, kind: str, *tensors: torch.Tensor, group: str = "g", **details) -> None:
        request = {"kind": kind, "group": group, "tensors": list(tensors)} | details
        self.hub.ask(self.rank, request, self.answers.append)

    @property
    def values(self) -> list:
        return [[tensor.tolist() for tensor in answer["tensors"]] for answer in self.answers]

    @property
    def errors(self) -> str:
        return " ".join(answer.get("error", "") for answer in self.answers)


def world(size: int) -> tuple[Hub, list[Rank]]:
    hub = Hub(size, 0)
    return hub, [Rank(hub, rank) for rank in range(size)]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("sum", 6.0), ("avg", 2.0), ("max", 3.0), ("min", 1.0), ("prod", 6.0)],
)
def test_all_reduce(operation, expected):
    _, ranks = world(3)
    for rank in ranks:
        rank.ask("all_reduce", torch.tensor([rank.rank + 1.0]), operation=operation)

    assert [rank.values for rank in ranks] == [[[[expected]]]] * 3


def test_the_other_collectives():
    _, ranks = world(2)
    for rank in ranks:
        own = torch.tensor([float(rank.rank)])
        rank.ask("broadcast", own, root=1)
        rank.ask("all_gather", own)
        rank.ask("gather", own, root=0)
        rank.ask("scatter", *([own, own + 5] if rank.rank == 0 else []), root=0)
        rank.ask("reduce_scatter", own, own + 1, operation="sum")
        rank.ask("barrier")
        rank.ask("reduce", own + 1, operation="sum", root=1)

    gathered = [[0.0], [1.0]]
    assert ranks[0].values == [[[1.0]], gathered, gathered, [[0.0]], [[1.0]], [], []]
    assert ranks[1].values == [[[1.0]], gathered, [], [[5.0]], [[3.0]], [], [[3.0]]]


def test_sends_arrive_in_order_whoever_comes_first():
    hub, (first, second) = world(2)
    second.ask("recv", peer=0, tag=7)
    first.ask("send", torch.tensor([1.0]), peer=1, tag=7)
    first.ask("send", torch.tensor([2.0]), peer=1, tag=7)
    second.ask("recv", peer=0, tag=7)

    assert second.values == [[[1.0]], [[2.0]]]
    assert [call.bytes for call in hub.calls[0]] == [4, 4]


def test_calls_are_recorded_with_bytes_and_order():
    hub, ranks = world(2)
    for rank in ranks:
        rank.ask("gate", name="layer 2")
        rank.ask("all_reduce", torch.zeros(3, dtype=torch.float64), operation="sum")
        rank.ask("gate", name="layer 1")

    expected = [("gate", "layer 2"), ("all_reduce", 24), ("gate", "layer 1")]
    assert hub.events == [expected, expected]
    assert set(hub.factors) == {"layer 1", "layer 2"}
    assert hub.factors["layer 1"] != hub.factors["layer 2"]


def test_a_gate_says_nothing_of_other_gates():
    factors = []
    for earlier in (0, 1, 5):
        _, ranks = world(2)
        for number in range(earlier):
            ranks[0].ask("gate", name=f"secret {number}")
        ranks[1].ask("gate", name="layer 1")
        factors.append(ranks[1].values)
    assert factors[0] == factors[1] == factors[2]


def test_different_calls_are_named():
    _, ranks = world(2)
    ranks[0].ask("all_reduce", torch.zeros(1), operation="sum")
    ranks[1].ask("all_reduce", torch.zeros(1), operation="max")

    for rank in ranks:
        assert "all_reduce(sum)" in rank.errors and "all_reduce(max)" in rank.errors


def test_different_shapes_are_named():
    _, ranks = world(2)
    ranks[0].ask("all_reduce", torch.zeros(1), operation="sum")
    ranks[1].ask("all_reduce", torch.zeros(2), operation="sum")

    assert "(1,)" in ranks[0].errors and "(2,)" in ranks[1].errors


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_call_that_a_rank_never_makes_would_hang(first):
    hub, ranks = world(2)
    if first:
        hub.end(1, "has returned")
    ranks[0].ask("all_reduce", torch.zeros(1), operation="sum")
    if not first:
        hub.end(1, "has returned")

    assert "rank 1 has returned" in ranks[0].errors
    assert "hang" in ranks[0].errors


def test_a_call_that_a_rank_made_before_it_ended_is_answered():
    hub, ranks = world(2)
    ranks[1].ask("all_reduce", torch.ones(1), operation="sum")
    hub.end(1, "has returned")
    ranks[0].ask("all_reduce", torch.ones(1), operation="sum")

    assert ranks[0].values == [[[2.0]]]


def test_calls_that_wait_are_listed():
    hub, ranks = world(3)
    ranks[0].ask("recv", peer=2, tag=0)
    ranks[1].ask("barrier")
    ranks[2].ask("recv", peer=1, tag=0)
    assert hub.unanswered() == (
        "rank 0 waits in recv from rank 2, rank 1 waits in barrier, "
        "rank 2 waits in recv from rank 1"
    )

    ranks[2].ask("send", torch.ones(1), peer=0, tag=0)
    ranks[1].ask("send", torch.ones(1), peer=2, tag=0)
    for rank in (0, 2):
        ranks[rank].ask("barrier")
    assert hub.unanswered() == ""


def test_the_time_limit_does_not_wait_for_a_rank_that_does_not_read(monkeypatch):
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.1)
    hub, _ = world(2)
    found: list[str] = []
    with hub.lock:  # as while an answer is being sent
        thread = threading.Thread(target=lambda: found.append(hub.unanswered()), daemon=True)
        thread.start()
        thread.join(5)

        assert found == [""]


def test_a_message_that_never_comes_would_hang():
    hub, ranks = world(2)
    ranks[0].ask("recv", peer=1, tag=0)
    hub.end(1, "has failed")
    ranks[0].ask("recv", peer=1, tag=0)

    assert ranks[0].errors.count("rank 1 has failed") == 2


@pytest.mark.parametrize(
    "details",
    [{"operation": "none"}, {"operation": "x" * 9_000}, {"root": 9}, {"root": "x"}, {}],
    ids=lambda details: repr(details)[:30],
)
@pytest.mark.parametrize(
    "kind", ["all_reduce", "broadcast", "scatter", "gather", "invented", ["gather"]], ids=repr
)
def test_a_forged_request_is_an_answer_not_an_exception(kind, details):
    _, ranks = world(2)
    for rank in ranks:
        rank.ask(kind, torch.zeros(1), **details)

    assert all(len(rank.answers) == 1 for rank in ranks)
    assert all(len(rank.errors) < 1_000 for rank in ranks)


def test_what_is_recorded_is_limited(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    _, ranks = world(2)
    ranks[0].ask("send", torch.zeros(20), peer=1, tag=0)
    ranks[0].ask("send", torch.zeros(20), peer=1, tag=0)

    assert "send more than" in ranks[0].errors


def test_the_number_of_requests_is_limited(monkeypatch):
    monkeypatch.setattr(module, "MAX_REQUESTS", 3)
    hub, ranks = world(1)
    for number in range(5):
        ranks[0].ask("gate", name=f"{number}")

    assert "more than 3" in ranks[0].errors
    assert len(hub.events[0]) == 3
