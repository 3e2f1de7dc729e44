"""Every collective of torch.distributed on virtual GPUs: its numbers, and its simulated time.

Four ranks with a virtual GPU each, on two nodes. The times are those of sim/network.py for the
group's ranks and links.
"""

import pytest
from virtual_ranks import run_ranks

from multigpu import LINKS
from multigpu.virtual.sim.network import Network, collective_seconds
from multigpu.virtual.sim.presets import KERNEL_OVERHEAD

pytestmark = pytest.mark.slow

NETWORK = Network(LINKS["NVLink2"], LINKS["HDR200"], 2)

COLLECTIVES = """
from torch.distributed.device_mesh import init_device_mesh

(device,) = control.start(1, gpus_per_node=2, between_nodes="HDR200")
join(device_id=device)
coalescing = dist.distributed_c10d._coalescing_manager
# torch 2.13 has new names for two of them.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def full(value, *shape):
    return torch.full(shape, float(value), device=device)


def empty(*shape):
    return torch.empty(shape, device=device)


@record
def average():
    x = full(rank, 5)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    whole = torch.tensor([rank, -rank], device=device)
    dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    return [x, whole]


@record
def sum_of_products():
    x = full(rank + 1, 5)
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
    return x


@record
def reduce_to_the_last():
    x, y = full(rank, 100_000), full(rank, 2)
    dist.reduce(x, ranks - 1)
    dist.reduce(y, ranks - 1, op=dist.ReduceOp.AVG)
    return [x.unique(), y]


@record
def gather_and_scatter_of_nothing():
    chunks = [empty(0) for _ in range(ranks)] if rank == 1 else None
    out = empty(0)
    dist.gather(empty(0), chunks, dst=1)
    dist.scatter(out, chunks, src=1)
    return out


@record
def gather_of_unequal_parts():
    out = [empty(i + 1) for i in range(ranks)]
    dist.all_gather(out, full(rank, rank + 1))
    return out


@record
def on_the_host():
    x, parts = torch.full((2,), float(rank)), [torch.empty(1) for _ in range(ranks)]
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    dist.all_to_all(parts, [torch.full((1,), 10.0 * rank + i) for i in range(ranks)])
    whole = torch.empty(ranks)
    with coalescing():
        all_gather(whole, torch.full((1,), float(rank)))
    return [x, *parts, whole]


@record
def gather_to_another_shape():
    out = empty(1, 2 * ranks)
    all_gather(out, full(rank, 1, 2))
    return out


@record
def gather_to_a_list_of_another_shape():
    out = [empty(1, 2) for _ in range(ranks)]
    dist.all_gather(out, full(rank, 2))
    return out


@record
def scatter_from_another_shape():
    out = empty(2)
    given = torch.arange(2.0 * ranks, device=device).view(2, ranks) + rank
    reduce_scatter(out, given, op=dist.ReduceOp.AVG)
    return out


@record
def scatter_of_a_list():
    out = empty(3)
    dist.reduce_scatter(out, [full(10 * rank + i, 3) for i in range(ranks)])
    return out


@record
def all_to_all_of_lists():
    # Rank r sends r + i + 1 numbers to rank i.
    out = [empty(i + rank + 1) for i in range(ranks)]
    dist.all_to_all(out, [full(10 * rank + i, rank + i + 1) for i in range(ranks)])
    return out


@record
def all_to_all_of_unequal_parts():
    sizes = [rank + i + 1 for i in range(ranks)]
    out = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    given = torch.cat([torch.full((s,), 10 * rank + i) for i, s in enumerate(sizes)])
    dist.all_to_all_single(out, given.to(device), sizes, sizes)
    return out


@record
def coalesced():
    sums = [full(rank, 3), full(1, 2, 2)]
    with coalescing():
        for tensor in sums:
            dist.all_reduce(tensor)
    wholes = [empty(ranks), empty(2 * ranks)]
    with coalescing(async_ops=True) as works:
        for i, whole in enumerate(wholes):
            all_gather(whole, full(rank, i + 1))
    works.wait()
    parts = [empty(1), empty(2)]
    with coalescing():
        for part, whole in zip(parts, wholes):
            reduce_scatter(part, whole)
    return [*sums, *wholes, *parts]


@record
def coalesced_one_by_one():
    tensors = [full(rank, 3), full(10 + rank, 1)]
    with coalescing(device=device, async_ops=True) as works:
        for root, tensor in enumerate(tensors):
            dist.broadcast(tensor, root)
    works.wait()
    return tensors


@record
def half_precision():
    sums = [full(rank, 2).to(dtype) for dtype in (torch.float16, torch.bfloat16)]
    for tensor in sums:
        dist.all_reduce(tensor)
    return sums


@record
def groups_of_a_mesh():
    mesh = init_device_mesh("vgpu", (2, 2), mesh_dim_names=("across", "inside"))
    sums = []
    for name in ("across", "inside"):
        sums.append(full(rank, 1000))
        dist.all_reduce(sums[-1], group=mesh[name].get_group())
    return [tensor[:1] for tensor in sums]


def error_of(call, *args):
    try:
        return call(*args)
    except ValueError as error:
        return str(error)


columns = full(1, 2, 3).t()
images = full(1, 1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
results["refused"] = [
    error_of(dist.all_reduce, columns),
    error_of(dist.broadcast, columns, 0),
    error_of(all_gather, full(1, 3 * ranks, 2), columns),
    error_of(dist.all_reduce, torch.eye(2, device=device).to_sparse()),
    error_of(dist.all_reduce, images),
]
print(json.dumps(results))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(COLLECTIVES, 4, tmp_path_factory.mktemp("ranks"))


def seconds(name: str, nbytes: int, gpus: tuple[int, ...] = (0, 1, 2, 3)) -> float:
    return KERNEL_OVERHEAD + collective_seconds(name, nbytes, NETWORK.group(gpus))


def of_each(numbers) -> list:
    """The numbers of each of the four ranks."""
    return [numbers(rank) for rank in range(4)]


def parts(rank: int) -> list:
    """What all ranks send to this one: rank r sends r + i + 1 numbers to rank i."""
    return [[float(10 * sender + rank)] * (sender + rank + 1) for sender in range(4)]


WHOLES = [[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]]
# {call: (each rank's results, the name and the bytes of each collective of a rank)}
RESULTS = {
    "average": ([[[1.5] * 5, [1, -1]]] * 4, [("allreduce", 20), ("allreduce", 16)]),
    "sum_of_products": ([[[5.0] * 5]] * 4, [("allreduce", 20)]),
    "gather_and_scatter_of_nothing": ([[[]]] * 4, [("gather", 0), ("scatter", 0)]),
    # Only the root of a reduce gets the sum.
    "reduce_to_the_last": (
        [*([[float(rank)], [float(rank)] * 2] for rank in range(3)), [[6.0], [1.5] * 2]],
        [("reduce", 400_000), ("reduce", 8)],
    ),
    "gather_of_unequal_parts": (
        [[[float(rank)] * (rank + 1) for rank in range(4)]] * 4,
        [("allgather", 40)],
    ),
    "on_the_host": (
        of_each(lambda rank: [[1.5] * 2, *([10.0 * i + rank] for i in range(4)), WHOLES[0]]),
        [],
    ),
    "gather_to_another_shape": ([[WHOLES[1:]]] * 4, [("allgather", 32)]),
    "gather_to_a_list_of_another_shape": (
        [[[[float(sender)] * 2] for sender in range(4)]] * 4,
        [("allgather", 32)],
    ),
    "scatter_from_another_shape": (
        of_each(lambda rank: [[2 * rank + 1.5, 2 * rank + 2.5]]),
        [("reduce_scatter", 32)],
    ),
    "scatter_of_a_list": (
        of_each(lambda rank: [[60.0 + 4 * rank] * 3]),
        [("reduce_scatter", 48)],
    ),
    # It takes as long as the rank with the most bytes: rank 3 has 4 + 5 + 6 + 7 numbers.
    "all_to_all_of_lists": (of_each(parts), [("alltoall", 22 * 4)]),
    "all_to_all_of_unequal_parts": (
        of_each(lambda rank: [[int(number) for part in parts(rank) for number in part]]),
        [("alltoall", 22 * 8)],
    ),
    # One launch moves all the bytes.
    "coalesced": (
        of_each(
            lambda rank: [[6.0] * 3, [[4.0] * 2] * 2, *WHOLES, [4.0 * rank], [4.0 * rank] * 2]
        ),
        [("allreduce", 28), ("allgather", 48), ("reduce_scatter", 48)],
    ),
    "coalesced_one_by_one": ([[[0.0] * 3, [11.0]]] * 4, [("broadcast", 12), ("broadcast", 4)]),
    "half_precision": ([[[6.0] * 2] * 2] * 4, [("allreduce", 4)] * 2),
}


def check(ranks: list, call: str, numbers: list, spans: list[tuple[str, float]]) -> None:
    """`numbers` are each rank's results; `spans` are the same on every rank."""
    assert [rank[call]["numbers"] for rank in ranks] == numbers
    for rank in ranks:
        assert rank[call]["spans"] == [[name, pytest.approx(span)] for name, span in spans]


@pytest.mark.parametrize("call", RESULTS)
def test_numbers_and_times(ranks, call):
    numbers, spans = RESULTS[call]
    check(ranks, call, numbers, [(name, seconds(name, nbytes)) for name, nbytes in spans])


def test_tensors_that_nccl_refuses(ranks):
    """Images with the channels last are contiguous, too."""
    contiguous = "Tensors must be contiguous"
    for rank in ranks:
        refused = [contiguous] * 3 + ["Tensors must be vgpu and dense", None]
        assert rank["refused"] == refused


def test_a_mesh_has_the_groups_of_its_dimensions(ranks):
    """Also after init_process_group(device_id=…)."""
    # Ranks 0 and 2, 1 and 3 across the nodes; 0 and 1, 2 and 3 inside.
    numbers = [[[2.0], [1.0]], [[4.0], [1.0]], [[2.0], [5.0]], [[4.0], [5.0]]]
    across = seconds("allreduce", 4000, (0, 2))
    inside = seconds("allreduce", 4000, (0, 1))
    spans = [("allreduce", across), ("allreduce", inside)]
    check(ranks, "groups_of_a_mesh", numbers, spans)
    assert across > 1.1 * inside
