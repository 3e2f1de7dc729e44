"""Custom operations, and functional collectives, which DTensor uses, on virtual GPUs."""

import pytest
import torch
from compare_devices import last
from virtual_ranks import run_ranks

from multigpu import LINKS
from multigpu.virtual.sim.network import Network, collective_seconds
from multigpu.virtual.sim.presets import KERNEL_OVERHEAD

SEEN = []


@torch.library.custom_op("vgpu_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(x.device)
    return x * x


square.register_autograd(
    lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_a_custom_operation_gets_tensors_of_the_device(two):
    SEEN.clear()
    x = torch.tensor([1.0, 3.0], device=two[1], requires_grad=True)
    y = square(x)
    assert SEEN == [two[1]] == [y.device]
    event = last("compute")
    assert (event.name, event.device) == ("mul", 1)
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 6.0]


PROGRAM = """
import warnings
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

warnings.simplefilter("ignore")
(device,) = control.start(1)
join()
world = dist.group.WORLD


def rows(*numbers):
    return torch.tensor(numbers, device=device)


@record
def reduced():
    one = rows(rank + 1.0, 2.0)
    both = functional.all_reduce_coalesced([one, one * 2], "sum", world)
    return [*(functional.all_reduce(one, name, world) for name in ("sum", "avg")), *both]


@record
def gathered():
    one = rows([rank, 1.0])
    both = functional.all_gather_into_tensor_coalesced([one, one * 2], world)
    return [functional.all_gather_tensor(one, 0, world), *both]


@record
def scattered():
    whole = rows([rank, 1.0], [2.0, 3.0])
    both = functional.reduce_scatter_tensor_coalesced([whole, whole * 2], "sum", [0, 0], world)
    return [functional.reduce_scatter_tensor(whole, "sum", 0, world), *both]


@record
def sent():
    one = rows(10.0 * rank, 10.0 * rank + 1)
    exchanged = functional.all_to_all_single(one, None, None, world)
    return [functional.broadcast(one, 1, world), exchanged]


@record
def differentiated():
    one = rows([rank + 1.0, 2.0]).requires_grad_()
    whole = functional.all_gather_tensor_autograd(one, 0, world)
    loss = functional.reduce_scatter_tensor_autograd(3 * whole, "sum", 0, world).sum()
    loss.backward()
    return [loss.detach(), one.grad]


@record
def in_place():
    one = rows(rank + 1.0)
    torch.ops._c10d_functional.all_reduce_(one, "sum", world.group_name)
    return functional.wait_tensor(one) * 10


@record
def with_an_output():
    operations, one = torch.ops._c10d_functional, rows([rank, 1.0])
    whole, part = one.new_empty(2, 2), one.new_empty(1, 2)
    operations.all_gather_into_tensor_out(one, ranks, world, out=whole)
    functional.wait_tensor(whole)
    operations.reduce_scatter_tensor_out(whole, "avg", ranks, world, out=part)
    return [whole, functional.wait_tensor(part)]


@record
def resharded():
    mesh = init_device_mesh("vgpu", (ranks,))
    part = DTensor.from_local(rows([rank, 1.0], [2.0, 3.0]), mesh, [Shard(0)])
    columns = part.redistribute(mesh, [Shard(1)])
    summed = DTensor.from_local(rows(rank + 1.0, 5.0), mesh, [Partial()])
    return [columns.to_local(), summed.redistribute(mesh, [Replicate()]).to_local()]


@record
def waited_for_by_a_view():
    summed = functional.all_reduce(rows(rank + 1.0, 2.0), "sum", world)
    column = functional.wait_tensor(summed.view(2, 1))
    return [column + 0, torch.tensor(torch._C._distributed_c10d._get_work_registry_size())]


print(json.dumps(results))
dist.destroy_process_group()
"""

NETWORK = Network(LINKS["NVLink2"])


def span(name: str, nbytes: int) -> list:
    seconds = KERNEL_OVERHEAD + collective_seconds(name, nbytes, NETWORK.group(2))
    return [name, pytest.approx(seconds)]


REDUCED = [[3.0, 4.0], [1.5, 2.0], [3.0, 4.0], [6.0, 8.0]]
GATHERED = [[[0.0, 1.0], [1.0, 1.0]]] * 2 + [[[0.0, 2.0], [2.0, 2.0]]]
SCATTERED = [[[1.0, 2.0]], [[4.0, 6.0]]]
SENT = [[0.0, 10.0], [1.0, 11.0]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(PROGRAM, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
def test_functional_collectives_are_on_the_clock(ranks):
    for rank, results in enumerate(ranks):
        numbers = {name: result["numbers"] for name, result in results.items()}
        assert numbers["reduced"] == REDUCED
        assert numbers["gathered"] == GATHERED
        part = SCATTERED[rank]
        assert numbers["scattered"] == [part, part, [[2 * x for x in part[0]]]]
        assert numbers["sent"] == [[10.0, 11.0], SENT[rank]]
        # 3 · (rows of both ranks); the gradient goes back to both ranks' sums
        assert numbers["differentiated"] == [6.0 * (rank + 3), [[6.0, 6.0]]]
        assert numbers["in_place"] == [[30.0]]
        assert numbers["with_an_output"] == [GATHERED[0], [GATHERED[0][rank]]]
        columns = [[0.0, 2.0, 1.0, 2.0], [1.0, 3.0, 1.0, 3.0]][rank]
        assert numbers["resharded"] == [[[x] for x in columns], [3.0, 10.0]]
        # None is left: torch would warn at the end.
        assert numbers["waited_for_by_a_view"] == [[[3.0], [4.0]], 0]
        spans = {name: result["spans"] for name, result in results.items()}
        one, two = span("allreduce", 8), span("allreduce", 16)
        assert spans["reduced"] == [two, one, one]
        assert spans["gathered"] == [span("allgather", 32), span("allgather", 16)]
        assert spans["scattered"] == [span("reduce_scatter", 32), span("reduce_scatter", 16)]
        assert spans["sent"] == [span("alltoall", 8), span("broadcast", 8)]
        there = [span("allgather", 16), span("reduce_scatter", 16)]
        assert spans["differentiated"] == there + there
        assert spans["in_place"] == [span("allreduce", 4)]
        assert spans["with_an_output"] == there
        assert spans["resharded"] == [span("alltoall", 16), span("allreduce", 8)]
