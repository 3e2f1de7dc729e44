"""The report of a run that stands still.

It says for each rank in which call it waits, which ranks are missing, and the likely mistake.
"""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from multigpu.errors import pluralize

# Called with a report's numbers before its process ends.
on_end: list[Callable[[dict], None]] = []
# torch's names of operations → the functions that programs call.
FUNCTIONS = {
    "ALLREDUCE": "all_reduce",
    "BROADCAST": "broadcast",
    "REDUCE": "reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "GATHER": "gather",
    "SCATTER": "scatter",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
    "BARRIER": "barrier",
    "SEND": "send",
    "RECV": "recv",
    "COALESCED": "batch_isend_irecv",
}
# Words in a condition that only some ranks meet.
OF_A_RANK = ("rank", "is_main", "is_master", "master_process", "main_process")


def words(call: dict) -> str:
    """A call in words: "all_reduce number 3 of the default group (4 elements of float32)"."""
    name = FUNCTIONS.get(call["operation"], call["operation"].lower())
    size = f"{pluralize(call['numel_in'], 'element')} of {call['dtype']}"
    if call["operation"] in ("SEND", "RECV"):
        towards = "to" if call["operation"] == "SEND" else "from"
        return f"{name} {towards} rank {call['peer']} ({call['group']}, {size})"
    root = f", root {call['root']}" if call["root"] >= 0 else ""
    return f"{name} number {call['number']} of {call['group']} ({size}{root})"


class Report(NamedTuple):
    """The states of the ranks (watchdog.py), when `rank` stands still in a group.

    group    the group's title, and `ranks` its ranks, by their numbers in the world
    states   of the ranks that have answered: "rank", "calls", "line", "waits", "ended"
    """

    group: str
    ranks: list[int]
    states: dict[int, dict]
    rank: int

    def text(self) -> str:
        """A line for each rank, and the likely mistake."""
        lines = [f"multigpu: rank {self.rank} stands still."]
        for number in sorted({*self.ranks, *self.states}):
            state = self.states.get(number)
            lines += (
                _lines(state)
                if state is not None
                else [f"  rank {number} does not answer: its process has ended"]
            )
        missing = self.missing()
        if missing:
            lines.append(f"  not in {self.group}: {_ranks(missing)}")
        if likely := self.likely():
            lines.append(f"  likely: {likely}")
        return "\n".join(lines)

    def as_json(self) -> dict:
        return {
            "rank": self.rank,
            "group": self.group,
            "ranks": list(self.states.values()),
            "missing": self.missing(),
            "likely": self.likely(),
        }

    def missing(self) -> list[int]:
        """The ranks of the group that wait in nothing of it."""
        return [number for number in self.ranks if not self._calls(number)]

    def _calls(self, number: int) -> list[dict]:
        state = self.states.get(number)
        if state is None or state["ended"]:
            return []
        return [call for call in state["calls"] if call["group"] == self.group]

    def likely(self) -> str:
        """The likely mistake in one sentence; "" for no known pattern."""
        calls = {number: waits[0] for number in self.ranks if (waits := self._calls(number))}
        messages = {r: c for r, c in calls.items() if c["operation"] in ("SEND", "RECV")}
        if messages:
            return self._of_messages(messages)
        if not calls:
            return ""
        missing = self.missing()
        if missing:
            return self._of_missing(calls, missing)
        return _of_other_calls(calls)

    def _of_missing(self, calls: dict[int, dict], missing: list[int]) -> str:
        """The likely mistake when some ranks of the group are in no call of it."""
        rank, call = next(iter(calls.items()))
        name = FUNCTIONS.get(call["operation"], call["operation"])
        if condition := condition_of_a_rank(call["line"]):
            return (
                f"{name} is called under `if {condition}`, which not all ranks enter: call it "
                f"on all ranks of the group, outside of the condition."
            )
        others = [state for state in self.states.values() if state["rank"] in missing]
        for other in others:
            if orders := self._two_groups(rank, other):
                return orders
        if any(other["ended"] for other in others) or len(others) < len(missing):
            return (
                f"{_ranks(missing)} made fewer calls and ended, while {_ranks(list(calls))} "
                f"went on, as with unequal numbers of batches: give all ranks as many steps "
                f"(DistributedSampler, drop_last=True, or DDP's join)."
            )
        return (
            f"{_ranks(missing)} never called {name}, or takes longer than the group's timeout "
            f"to get there."
        )

    def _two_groups(self, rank: int, other: dict | None) -> str:
        """The sentence for a rank that waits in another group; "" if `other` does not."""
        for call in other["calls"] if other is not None and not other["ended"] else ():
            if call["group"] != self.group:
                return (
                    f"the ranks use two groups in other orders: rank {rank} is in "
                    f"{self.group}, rank {other['rank']} in {call['group']}. Use the "
                    f"groups in one order on all ranks."
                )
        return ""

    def _of_messages(self, calls: dict[int, dict]) -> str:
        """The likely mistake when ranks wait in sends and receives."""
        if circle := _circle(calls):
            return (
                f"{_ranks(circle)} send in a circle, and a first isend to a rank waits for "
                f"its receive: let every other rank receive first, or use batch_isend_irecv."
            )
        for rank, call in calls.items():
            peer = call["peer"]
            peer_call = calls.get(peer)
            if peer_call is not None and peer_call["peer"] == rank:
                if peer_call["operation"] == call["operation"]:
                    action = "send to" if call["operation"] == "SEND" else "wait for"
                    return (
                        f"ranks {rank} and {peer} both {action} each other: one of them has "
                        f"to {'receive' if call['operation'] == 'SEND' else 'send'} first, or "
                        f"use batch_isend_irecv. Messages between two ranks arrive in the "
                        f"order of the calls, tags mean nothing."
                    )
                if any(peer_call[key] != call[key] for key in ("numel_in", "dtype")):
                    return (
                        f"rank {rank} has {pluralize(call['numel_in'], 'element')} of "
                        f"{call['dtype']}, and rank {peer} {peer_call['numel_in']:,} of "
                        f"{peer_call['dtype']}: a message and its receive need the same size."
                    )
        rank, call = next(iter(calls.items()))
        if orders := self._two_groups(rank, self.states.get(call["peer"])):
            return orders
        verb, needed = (
            ("sends to", "receive") if call["operation"] == "SEND" else ("waits for", "send")
        )
        return (
            f"rank {rank} {verb} rank {call['peer']}, which never calls the {needed} that "
            f"belongs to it."
        )


def _circle(calls: dict[int, dict]) -> list[int]:
    """Three ranks or more, each in a send to the next one; an empty list if there are none."""
    for rank in calls:
        circle = []
        while rank not in circle:
            if rank not in calls or calls[rank]["operation"] != "SEND":
                break
            circle.append(rank)
            rank = calls[rank]["peer"]
        else:
            circle = circle[circle.index(rank) :]
            if len(circle) > 2:
                return sorted(circle)
    return []


def _of_other_calls(calls: dict[int, dict]) -> str:
    """The likely mistake when all ranks wait in calls of the group; "" for none."""
    (rank, call), *others = calls.items()
    for other, other_call in others:
        if other_call["operation"] != call["operation"]:
            return (
                f"the ranks call other collectives: rank {rank} {words(call)}, rank {other} "
                f"{words(other_call)}. All ranks of a group must call the same ones in the "
                f"same order."
            )
        for key, plural in (("root", "roots"), ("dtype", "types"), ("sizes", "sizes")):
            if other_call[key] != call[key]:
                return (
                    f"the ranks call {FUNCTIONS.get(call['operation'])} with other {plural}: "
                    f"{call[key]} on rank {rank}, {other_call[key]} on rank {other}."
                )
    return f"{call['stuck']}." if call["stuck"] else ""


def _lines(state: dict) -> list[str]:
    """A rank's lines in the report: one for each call in which it waits."""
    rank = state["rank"]
    if state["ended"]:
        return [
            f"  rank {rank} has left: it has destroyed its group, or its program has ended"
        ]
    lines = [
        f"  rank {rank} waits in {words(call)}{_at(call['line'])}" for call in state["calls"]
    ]
    return lines or [f"  rank {rank} is in no collective{_at(state['line'])}"]


def _at(line: str) -> str:
    return f", {Path(line).name}" if line else ""


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    more = ", …" if len(numbers) > 8 else ""
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}{more}"


def condition_of_a_rank(line: str) -> str:
    """The condition on the rank around a line of a program; "" if there is none."""
    path, _, number = line.rpartition(":")
    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return ""
    innermost = ""
    for node in ast.walk(tree):
        if not isinstance(node, ast.If):
            continue
        first, last = node.body[0].lineno, node.body[-1].end_lineno
        if first <= int(number) <= last:
            condition = ast.unparse(node.test)
            if any(word in condition.lower() for word in OF_A_RANK):
                innermost = condition
    return innermost
