"""The network between a student's ranks: it records each collective, and carries it out.

The ranks run in processes that share nothing, so a value of another rank reaches a rank only
through here. What is recorded is what was sent.
"""

import random
import threading
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

REDUCTIONS = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}
# What a rank may call, with the fields of the request beside its tensors.
FIELDS = {
    "all_reduce": ("group", "operation"),
    "reduce": ("group", "operation", "root"),
    "broadcast": ("group", "root"),
    "barrier": ("group",),
    "all_gather": ("group",),
    "reduce_scatter": ("group", "operation"),
    "gather": ("group", "root"),
    "scatter": ("group", "root"),
    "send": ("peer", "tag"),
    "recv": ("peer", "tag"),
    "gate": ("name",),
}
NUMBERS = ("root", "peer", "tag")
MAX_BYTES = 256 << 20  # of all that is recorded
TENSOR_BYTES = 4 << 10  # at most, of a tensor beside its elements
MAX_REQUESTS = 20_000  # of a rank
MAX_NAME = 200  # characters
LOCK_SECONDS = 1.0
SAME_ON_ALL_RANKS = ("kind", "group", "operation", "root")


class Mismatch(Exception):
    """The ranks called different collectives, or one has ended before the others' call."""


@dataclass(frozen=True)
class Call:
    """One rank's call of a collective, with the tensors that it sent."""

    kind: str
    bytes: int
    tensors: list[torch.Tensor]


class Hub:
    """Carries out the collectives of `size` ranks. Thread-safe: each rank has a thread."""

    def __init__(self, size: int, seed: int):
        """Prepare the network. The seed and a gate's name give the gate's factor."""
        self.size = size
        self.factors: dict[str, float] = {}
        self.bytes = 0
        self._seed = seed
        self.calls: list[list[Call]] = [[] for _ in range(size)]
        self.events: list[list[tuple[str, Any]]] = [[] for _ in range(size)]
        self.lock = threading.Lock()
        self.waiting: dict[str, list[list[tuple[dict, Any]]]] = {}
        self.mail: dict[tuple[int, int, int], list[list[torch.Tensor]]] = {}
        self.receivers: dict[tuple[int, int, int], list[Any]] = {}
        self.ended: dict[int, str] = {}

    def ask(self, rank: int, request: dict, answer: Any) -> None:
        """A rank calls a collective; `answer` is called with a dict when it is complete.

        The request may be forged: its answer is then an error.
        """
        try:
            tensors, request = _checked(request)
        except ValueError as error:
            answer({"error": str(error)})
            return
        kind = request["kind"]
        sent = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        with self.lock:
            if len(self.events[rank]) >= MAX_REQUESTS:
                answer({"error": f"rank {rank} calls more than {MAX_REQUESTS:,} collectives"})
                return
            for name in ("root", "peer"):
                if name in request and not 0 <= request[name] < self.size:
                    answer({"error": f"{_words(request)}: there is no rank {request[name]}"})
                    return
            if kind == "gate":
                self._gate(rank, request["name"], answer)
                return
            self.bytes += sent + TENSOR_BYTES * len(tensors)
            if self.bytes > MAX_BYTES:
                answer({"error": f"the ranks send more than {MAX_BYTES >> 20:,} MiB"})
                return
            self.calls[rank].append(Call(kind, sent, tensors))
            self.events[rank].append((kind, sent))
            if kind in ("send", "recv"):
                self._by_mail(rank, kind, request, tensors, answer)
                return
            queues = self.waiting.setdefault(request["group"], [[] for _ in range(self.size)])
            queues[rank].append((request | {"tensors": tensors}, answer))
            if all(queues):
                self._carry_out([queue.pop(0) for queue in queues])
            else:
                self._fail(queues)

    def _gate(self, rank: int, name: str, answer: Any) -> None:
        self.events[rank].append(("gate", name))
        # Not by the order of the gates: a rank would learn which ones others have come to.
        self.factors[name] = random.Random(f"{self._seed} {name}").uniform(0.5, 1.5)
        answer({"tensors": [torch.tensor(self.factors[name], dtype=torch.float64)]})

    def end(self, rank: int, why: str) -> None:
        """A rank has returned, or failed: who waits for it would wait for ever."""
        with self.lock:
            self.ended[rank] = why
            for queues in self.waiting.values():
                self._fail(queues)
            for (source, _, _), receivers in self.receivers.items():
                if source == rank:
                    while receivers:
                        receivers.pop(0)(_nothing_more(rank, why))

    def unanswered(self) -> str:
        """The calls that wait for other ranks, such as "rank 0 waits in recv from rank 1".

        "" while an answer is being sent to a rank that does not read it.
        """
        waits = []
        if not self.lock.acquire(timeout=LOCK_SECONDS):
            return ""
        try:
            for (source, rank, _), receivers in self.receivers.items():
                waits += [(rank, f"recv from rank {source}")] * len(receivers)
            for queues in self.waiting.values():
                for rank, queue in enumerate(queues):
                    waits += [(rank, request["kind"]) for request, _ in queue]
        finally:
            self.lock.release()
        return ", ".join(f"rank {rank} waits in {call}" for rank, call in sorted(waits))

    def _fail(self, queues: list[list[tuple[dict, Any]]]) -> None:
        """Answer the calls that a rank which has ended will never make."""
        missing = [rank for rank in self.ended if not queues[rank]]
        if not missing:
            return
        for rank, queue in enumerate(queues):
            while queue:
                request, answer = queue.pop(0)
                answer(
                    {
                        "error": f"rank {rank} waits in {request['kind']}, but rank "
                        f"{missing[0]} {self.ended[missing[0]]} without calling it: on a "
                        f"cluster, this hangs"
                    }
                )

    def _carry_out(self, calls: list[tuple[dict, Any]]) -> None:
        requests = [request for request, _ in calls]
        first = requests[0]
        try:
            for rank, request in enumerate(requests):
                for name in SAME_ON_ALL_RANKS:
                    if request.get(name) != first.get(name):
                        raise Mismatch(
                            f"rank 0 calls {_words(first)} while rank {rank} calls "
                            f"{_words(request)}: all ranks must make the same calls in the "
                            f"same order"
                        )
            results = self._results(first, [request["tensors"] for request in requests])
        except (Mismatch, RuntimeError, LookupError, TypeError, ValueError) as error:
            # Or a request that no rank of an honest student can send, or tensors that differ.
            cannot = (
                "" if type(error) is Mismatch else f"{_words(first)} cannot be carried out: "
            )
            for _, answer in calls:
                answer({"error": f"{cannot}{error}"})
            return
        for (_, answer), tensors in zip(calls, results, strict=True):
            answer({"tensors": tensors})

    def _results(
        self, request: dict, sent: list[list[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        """What each rank gets."""
        kind = request["kind"]
        size = self.size
        shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in sent]
        senders = [request["root"]] if kind in ("broadcast", "scatter") else range(size)
        for rank in senders:
            if shapes[rank] != shapes[senders[0]]:
                raise Mismatch(
                    f"in {kind}, rank {senders[0]} sends shapes {shapes[senders[0]]} and rank "
                    f"{rank} sends {shapes[rank]}: they must be the same"
                )
        if kind == "barrier":
            return [[] for _ in range(size)]
        if kind == "broadcast":
            return [sent[request["root"]]] * size
        if kind == "scatter":
            return [[tensor] for tensor in sent[request["root"]]]
        if kind in ("all_gather", "gather"):
            received = [tensors[0] for tensors in sent]
        else:
            combine = REDUCTIONS[request["operation"]]
            received = [reduce(combine, column) for column in zip(*sent, strict=True)]
            if request["operation"] == "avg":
                received = [total / size for total in received]
        if kind == "reduce_scatter":
            return [[total] for total in received]
        return [received if rank == request.get("root", rank) else [] for rank in range(size)]

    def _by_mail(
        self, rank: int, kind: str, request: dict, tensors: list[torch.Tensor], answer: Any
    ) -> None:
        if kind == "send":
            key = (rank, request["peer"], request["tag"])
            self.mail.setdefault(key, []).append(tensors)
            answer({"tensors": []})
        else:
            key = (request["peer"], rank, request["tag"])
            self.receivers.setdefault(key, []).append(answer)
        letters = self.mail.setdefault(key, [])
        receivers = self.receivers.setdefault(key, [])
        while letters and receivers:
            receivers.pop(0)({"tensors": letters.pop(0)})
        if receivers and key[0] in self.ended:
            why = self.ended[key[0]]
            receivers.pop(0)(_nothing_more(key[0], why))


def _checked(request: dict) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The tensors, and the other fields; fields that ranks.py does not send are left out.

    Raises ValueError for a request that ranks.py cannot have sent.
    """
    kind, tensors = request.get("kind"), request.get("tensors")
    if type(kind) is not str or kind not in FIELDS:
        raise ValueError("there is no such collective")
    if type(tensors) is not list or not all(isinstance(t, torch.Tensor) for t in tensors):
        raise ValueError(f"{kind} with something that is no tensor")
    for name in FIELDS[kind]:
        value = request.get(name)
        if type(value) is not (int if name in NUMBERS else str) or len(str(value)) > MAX_NAME:
            raise ValueError(f"{kind} with a wrong {name}")
    return tensors, {name: request[name] for name in ("kind", *FIELDS[kind])}


def _nothing_more(rank: int, why: str) -> dict[str, str]:
    return {"error": f"rank {rank} {why} and sends nothing more: on a cluster, this hangs"}


def _words(request: dict) -> str:
    extra = [f"{request[name]}" for name in ("operation", "root") if name in request]
    return f"{request['kind']}({', '.join(extra)})"
