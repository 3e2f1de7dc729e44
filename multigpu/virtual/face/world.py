"""A process that is one rank of a large world: `multigpu virtual --world 1024 script.py`.

The command gives the process the environment of a rank under torchrun. The other ranks do not
exist, so what would wait for them is replaced here; the groups are in nccl.py.
"""

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from multigpu.errors import UserError
from multigpu.virtual.ops.tensor import VirtualTensor
from multigpu.virtual.options import JOINING, Options
from multigpu.virtual.patches.replacing import Replacement, Row, rows

_C10D = "torch.distributed.distributed_c10d"
_MESH = "torch.distributed.device_mesh"
_CHECKPOINT = "torch.distributed.checkpoint"


class _Wanted:
    """The options of the run, if this process is one rank of a world."""

    options: Options | None = None


def want(options: Options) -> None:
    """Choose whether the rows below apply at the next TABLE.apply()."""
    _Wanted.options = options if options.world is not None else None


def is_wanted() -> bool:
    """Whether this process is one rank of a large world."""
    return _Wanted.options is not None


def own_rank() -> int:
    """This process's rank, which the command has set."""
    return int(os.environ["RANK"])


def _rendezvous(original: Callable) -> Callable:
    """A rendezvous without the other ranks; it joins those that run."""

    def rendezvous(
        url: str, rank: int = -1, world_size: int = -1, **options: Any
    ) -> Iterator[tuple[dist.Store, int, int]]:
        size, own = _Wanted.options.world, own_rank()
        if rank not in (-1, own) or world_size not in (-1, size):
            rank = own if rank == -1 else rank
            world_size = size if world_size == -1 else world_size
            raise UserError(
                f"the program starts as rank {rank:,} of {world_size:,}, but this run is "
                f"rank {own:,} of {size:,} (--world, --as-rank): take the rank and the world "
                f"size from RANK and WORLD_SIZE, as under torchrun."
            )
        _join_running_ranks()
        yield dist.HashStore(), own, size

    return rendezvous


def _join_running_ranks() -> None:
    """Join the processes of --as-rank, so that they can send messages to each other."""
    ranks = _Wanted.options.ranks
    if len(ranks) > 1:
        from multigpu.virtual.patches.world_group import Messenger, set_messenger

        store = dist.FileStore(os.environ[JOINING], len(ranks))
        set_messenger(Messenger(store, ranks, own_rank()))


def _store(original: type) -> Callable[..., dist.Store]:
    def TCPStore(*arguments: Any, **options: Any) -> dist.Store:
        return dist.HashStore()

    return TCPStore


def _spawn(original: Callable) -> Callable:
    """mp.spawn calls the function for the one rank of this node that runs."""

    def spawn(
        fn: Callable,
        args: tuple = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> None:
        fn(int(os.environ["LOCAL_RANK"]), *args)

    return spawn


def _mesh(original: Callable) -> Callable:
    """init_device_mesh. Raises UserError if the mesh is not as large as the world."""

    def init_device_mesh(device_type: str, mesh_shape: tuple[int, ...], **options: Any) -> Any:
        ranks, size = prod(mesh_shape), _Wanted.options.world
        if ranks != size:
            shape = " × ".join(map(str, mesh_shape))
            raise UserError(
                f"the mesh {shape} has {ranks:,} ranks, but the world has {size:,}: give "
                f"--world {ranks}, or a mesh of {size:,} ranks."
            )
        return original(device_type, mesh_shape, **options)

    return init_device_mesh


def _objects_of_one_rank(original: Callable) -> Callable:
    """dist.broadcast_object_list or scatter_object_list, for the source's rank alone.

    On another rank it raises UserError: the source's objects do not exist.
    """

    @wraps(original)
    def exchange(*arguments: Any, **options: Any) -> Any:
        bound = signature(original).bind(*arguments, **options).arguments
        source = bound.get("src") or 0
        if bound.get("group_src") is not None:
            group = bound.get("group") or dist.group.WORLD
            source = dist.get_global_rank(group, bound["group_src"])
        if source != own_rank():
            raise UserError(
                f"rank {own_rank():,} gets objects from rank {source:,}, which does not run: "
                f"use --as-rank {source}, or make the objects on each rank."
            )
        return original(*arguments, **options)

    return exchange


def _same_objects(original: Callable) -> Callable:
    """dist.gather_object and all_gather_object: all ranks have an object like this rank's.

    A distributed checkpoint collects the shards of all ranks with them, which no copies of
    this rank's shards can replace.
    """

    @wraps(original)
    def gather(*arguments: Any, **options: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith(_CHECKPOINT):
            raise UserError(
                f"a distributed checkpoint (torch.distributed.checkpoint) has the shards of "
                f"all ranks, but of {_Wanted.options.world:,} only rank {own_rank():,} runs: "
                f"leave it out here, or save with torch.save."
            )
        if _Wanted.options.shapes_only:
            bound = signature(original).bind(*arguments, **options).arguments
            _Gathered.pickled = pickle.dumps(bound["obj"])
        try:
            return original(*arguments, **options)
        finally:
            _Gathered.pickled = None

    return gather


class _Gathered:
    """The object, pickled, that this rank gives to a gathering which now runs."""

    pickled: bytes | None = None


def _object_of_shape(original: Callable) -> Callable:
    """torch's reader of gathered objects, for bytes that with --shapes-only are unknown."""

    def _tensor_to_object(tensor: torch.Tensor, *arguments: Any) -> Any:
        unknown = type(tensor) is VirtualTensor and tensor._payload.is_meta
        if unknown and _Gathered.pickled is not None:
            return pickle.loads(_Gathered.pickled)
        return original(tensor, *arguments)

    return _tensor_to_object


_WAITS = "it would wait for ranks that do not exist"
_BYTES = "with --shapes-only the bytes of a long object are not known"
ROWS: tuple[Row, ...] = (
    Replacement(_C10D, "rendezvous", _rendezvous, _WAITS, when=is_wanted),
    Replacement("torch.distributed", "TCPStore", _store, _WAITS, when=is_wanted),
    Replacement(
        "torch.multiprocessing",
        "spawn",
        _spawn,
        "one rank of a world is one process",
        is_wanted,
    ),
    *rows(
        (_MESH, "torch.distributed"),
        ["init_device_mesh"],
        _mesh,
        "a mesh that is smaller than the world would give the times of a smaller world",
        is_wanted,
    ),
    *rows(
        (_C10D, "torch.distributed"),
        ("broadcast_object_list", "scatter_object_list"),
        _objects_of_one_rank,
        "the source has objects that this process cannot know",
        is_wanted,
    ),
    *rows(
        (_C10D, "torch.distributed"),
        ("gather_object", "all_gather_object"),
        _same_objects,
        _BYTES,
        is_wanted,
    ),
    Replacement(_C10D, "_tensor_to_object", _object_of_shape, _BYTES, is_wanted),
)
