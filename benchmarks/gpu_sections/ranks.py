"""A DDP step of several ranks against the serial step, and each collective by name.

Used by shared_gpu.py (gloo) and nccl.py.
"""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from workloads import TINY, compute_exactly, loss_of, new_batch, new_model, training_step

STEPS = 3


def collectives(device: torch.device) -> dict[str, Callable[[], bool]]:
    """Each collective's name → a function that calls it, and returns whether it was right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = float(sum(range(1, size + 1)))

    def own() -> torch.Tensor:
        return torch.full((4 * size,), rank + 1.0, device=device)

    def all_reduce() -> bool:
        x = own()
        dist.all_reduce(x)
        return bool((x == total).all())

    def broadcast() -> bool:
        x = own()
        dist.broadcast(x, 0)
        return bool((x == 1).all())

    def all_gather() -> bool:
        parts = [torch.zeros(4 * size, device=device) for _ in range(size)]
        dist.all_gather(parts, own())
        return all(bool((part == i + 1).all()) for i, part in enumerate(parts))

    def reduce_scatter() -> bool:
        out = torch.zeros(4, device=device)
        dist.reduce_scatter_tensor(out, own())
        return bool((out == total).all())

    def all_to_all() -> bool:
        out = torch.zeros(4 * size, device=device)
        dist.all_to_all_single(out, own())
        return all(bool((part == i + 1).all()) for i, part in enumerate(out.split(4)))

    def gather_objects() -> bool:
        found: list = [None] * size
        dist.all_gather_object(found, rank)
        return found == list(range(size))

    def barrier() -> bool:
        dist.barrier()
        return True

    return {
        "all_reduce": all_reduce,
        "broadcast": broadcast,
        "all_gather": all_gather,
        "reduce_scatter_tensor": reduce_scatter,
        "all_to_all_single": all_to_all,
        "all_gather_object": gather_objects,
        "barrier": barrier,
    }


def try_collectives(device: torch.device) -> list[dict]:
    """A row for each collective: whether its result was right, or its error."""
    rows = []
    for name, call in collectives(device).items():
        try:
            rows.append({"case": name, "ok": call()})
        except Exception as error:
            rows.append({"case": name, "ok": False, "error": str(error).split("\n")[0]})
    return rows


def ddp_difference(model_name: str, rows: int, device: torch.device) -> float:
    """The largest difference between DDP's weights and the serial run's, after STEPS steps.

    Each rank takes its part of a batch of `rows` rows. In full float32.
    """
    compute_exactly()
    rank, size = dist.get_rank(), dist.get_world_size()
    serial = new_model(model_name, TINY).to(device)
    parallel = DDP(copy.deepcopy(serial))
    batch = new_batch(model_name, TINY, rows, device)
    own = (batch[0].chunk(size)[rank], batch[1].chunk(size)[rank])
    one_process = training_step(serial, batch)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01, momentum=0.9)
    for _ in range(STEPS):
        one_process()
        optimizer.zero_grad()
        loss_of(parallel, own).backward()
        optimizer.step()
    pairs = zip(serial.parameters(), parallel.module.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
