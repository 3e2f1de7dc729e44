"""Unchanged programs of PyTorch's parallel training on virtual GPUs equal the serial run.

FSDP2 and FSDP1, ZeroRedundancyOptimizer, distributed checkpoints, and DDP's options, in two
processes and in four on two nodes. The communication of FSDP2 is on the clock, and its memory
in the meter. Lesson 16's proof has tensor and sequence parallelism, and tests/prove FSDP2 with
mixed precision, both on virtual GPUs.
"""

import pytest
from virtual_ranks import run_ranks

from multigpu import LINKS
from multigpu.virtual.sim.network import Network, collective_seconds
from multigpu.virtual.sim.presets import KERNEL_OVERHEAD

pytestmark = pytest.mark.slow

PROGRAM = """
import copy, warnings
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

warnings.simplefilter("ignore")
folder = sys.argv[3]
(device,) = control.start(1, gpus_per_node=2, between_nodes="HDR200")
join(device_id=device)
results = {}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    \"\"\"`spare` is used in calls with use_spare=True only.\"\"\"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.spare = nn.Linear(16, 16)

    def forward(self, x, use_spare=True):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.spare(x) if use_spare else x)


def loss_of(model, step, rows=slice(None), use_spare=True):
    source = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, size, generator=source) for size in (8, 4))
    place = next(model.parameters()).device
    out = model(x[rows].to(place), use_spare)
    return nn.functional.mse_loss(out, y[rows].to(place))


def train(model, loss=loss_of, optimizer=None, **options):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(5):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    return model


def own_loss(model, step):
    return loss_of(model, step, slice(rank, None, ranks))


def difference(model, serial):
    \"\"\"The largest difference of a weight.\"\"\"
    pairs = zip(model.parameters(), serial.parameters(), strict=True)
    whole = lambda p: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu()
    return max((whole(p) - q).abs().max().item() for p, q in pairs)


SERIAL = train(Net())


def record(call):
    # Two ranks load what four have saved; all else is the same with two.
    if ranks == 4 or call.__name__ in ("memory_and_time", "a_checkpoint"):
        results[call.__name__] = call()


def sharded(net, **options):
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)
    return net


@record
def memory_and_time():
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).to(device)
    for layer in layers:
        fully_shard(layer)
    fully_shard(layers)
    x = torch.ones(1, 256, device=device)
    shards = torch.vgpu.memory_allocated() - x.nbytes
    since = len(control.timeline().events)
    torch.vgpu.reset_peak_memory_stats()
    out = layers(x)
    peak = torch.vgpu.max_memory_allocated()
    out.sum().backward()
    del out
    events = [e for e in control.timeline().events[since:] if e.kind == "collective"]
    return {
        "shards": shards,
        "peak": peak,
        "after": torch.vgpu.memory_allocated() - x.nbytes,
        "spans": sorted([e.name, e.end - e.start] for e in events),
    }


@record
def without_synchronisation():
    net = DDP(Net().to(device))
    with net.no_sync():
        train(net, own_loss)
    return difference(net, SERIAL)


@record
def hybrid_sharding():
    # Replicas on the two nodes; each is sharded inside its node.
    mesh = init_device_mesh("vgpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return difference(train(sharded(Net().to(device), mesh=mesh), own_loss), SERIAL)


@record
def fsdp1():
    net = Net()
    for i, block in enumerate(net.blocks):
        net.blocks[i] = FSDP(block, device_id=device, use_orig_params=True)
    net = train(FSDP(net, device_id=device, use_orig_params=True), own_loss)
    with FSDP.summon_full_params(net):
        return difference(net, SERIAL)


@record
def zero():
    net = DDP(Net().to(device))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)
    return difference(train(net, own_loss, optimizer), SERIAL)


def uneven_loss(model, step):
    \"\"\"Rank 0 alone uses `spare`.\"\"\"
    return loss_of(model, step, slice(rank, None, ranks), use_spare=rank == 0)


def uneven_losses(model, step):
    rows = [slice(other, None, ranks) for other in range(ranks)]
    losses = [loss_of(model, step, part, use_spare=part.start == 0) for part in rows]
    return sum(losses) / ranks


@record
def ddp_with_unused_parameters():
    net = DDP(Net().to(device), find_unused_parameters=True)
    since = len(control.timeline().events)
    train(net, uneven_loss)
    events = [e for e in control.timeline().events[since:] if e.kind == "collective"]
    results["map"] = [len(list(net.parameters())), events[-1].end - events[-1].start]
    return difference(net, train(Net(), uneven_losses))


@record
def ddp_with_a_static_graph():
    net = DDP(Net().to(device), static_graph=True, gradient_as_bucket_view=True)
    return difference(train(net, own_loss), SERIAL)


def normalised(dtype, affine):
    \"\"\"The largest difference to batch norm of all ranks' images: rank r has r + 1.\"\"\"
    torch.manual_seed(0)
    sizes = [rank + 1 for rank in range(ranks)]
    images = torch.randn(sum(sizes), 3, 4, 5, dtype=dtype, device=device)
    whole, grad = images.clone().requires_grad_(), torch.randn_like(images)
    own = images.split(sizes)[rank].clone().requires_grad_()
    serial = nn.BatchNorm2d(3, affine=affine).to(device)
    for parameter in serial.parameters():
        nn.init.uniform_(parameter)
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(serial))
    expected, out = serial(whole), layer(own)
    expected.backward(grad)
    out.backward(grad.split(sizes)[rank])
    pairs = [(out, expected.split(sizes)[rank]), (own.grad, whole.grad.split(sizes)[rank])]
    pairs += zip(layer.buffers(), serial.buffers())
    for parameter, right in zip(layer.parameters(), serial.parameters()):
        dist.all_reduce(parameter.grad)
        pairs.append((parameter.grad, right.grad))
    assert all(one.dtype is other.dtype for one, other in pairs)
    return max((one - other).abs().max().item() for one, other in pairs)


@record
def sync_batch_norm():
    exact = [normalised(torch.float32, affine) for affine in (True, False)]
    return [max(exact), normalised(torch.float16, True)]


@record
def a_checkpoint():
    net = sharded(Net().to(device))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if ranks == 4:
        train(net, own_loss, optimizer)
        model_state, optimizer_state = get_state_dict(net, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        return difference(net, SERIAL)
    # What four ranks have saved.
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(
        net,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
    )
    loaded = difference(net, SERIAL)
    # Five more steps, in which the optimizer's state counts.
    serial = Net()
    update = torch.optim.AdamW(serial.parameters(), lr=1e-2)
    train(train(serial, optimizer=update), optimizer=update)
    return max(loaded, difference(train(net, own_loss, optimizer), serial))


dist.barrier()
print(json.dumps(results))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def four(folder):
    return run_ranks(PROGRAM, 4, folder, folder / "checkpoint")


@pytest.fixture(scope="module")
def two(folder, four):
    """After `four`, whose checkpoint these two load."""
    return run_ranks(PROGRAM, 2, folder, folder / "checkpoint")


@pytest.fixture(params=[2, 4])
def ranks(request, two, four):
    return {2: two, 4: four}[request.param]


@pytest.mark.parametrize(
    "what",
    [
        "hybrid_sharding",
        "fsdp1",
        "zero",
        "ddp_with_unused_parameters",
        "ddp_with_a_static_graph",
        "a_checkpoint",
    ],
)
def test_sharded_training_equals_the_serial_run(four, what):
    """After five steps of AdamW."""
    assert [rank[what] < 1e-6 for rank in four] == [True] * 4, four[0][what]


def test_sync_batch_norm_is_batch_norm_of_all_images(four):
    for exact, half in (rank["sync_batch_norm"] for rank in four):
        assert exact <= 1e-5 and half <= 2e-2


def test_two_ranks_load_the_checkpoint_of_four(two):
    """They go on with the optimizer's state, too."""
    assert [rank["a_checkpoint"] < 1e-6 for rank in two] == [True] * 2, two[0]["a_checkpoint"]


def test_the_comparison_sees_a_run_without_synchronisation(four):
    assert all(rank["without_synchronisation"] > 1e-3 for rank in four)


def seconds(name: str, nbytes: int, ranks: int) -> float:
    network = Network(LINKS["NVLink2"], LINKS["HDR200"], 2)
    return KERNEL_OVERHEAD + collective_seconds(name, nbytes, network.group(ranks))


def test_the_memory_of_fsdp2(ranks):
    """Four layers of 256 × 256 weights of 4 bytes.

    At the peak a rank has its shards, the outputs of two all-gathers (torch keeps the one
    before), the weights of one layer, and the inputs of four layers, of 256 numbers.
    """
    layer = 256 * 256 * 4
    for rank in ranks:
        found = rank["memory_and_time"]
        assert found["shards"] == 4 * layer // len(ranks)
        assert found["peak"] == found["shards"] + 3 * layer + 4 * 256 * 4
        # weights and gradients
        assert found["after"] == 2 * found["shards"]


def test_the_time_of_fsdp2s_collectives(ranks):
    """Forward and backward gather each layer, and backward scatters its gradients."""
    layer = 256 * 256 * 4
    gather, scatter = (
        pytest.approx(seconds(name, layer, len(ranks)))
        for name in ("allgather", "reduce_scatter")
    )
    for rank in ranks:
        spans = [["allgather", gather]] * 8 + [["reduce_scatter", scatter]] * 4
        assert rank["memory_and_time"]["spans"] == spans


def test_the_time_of_ddps_map_of_used_parameters(four):
    """The last all-reduce of a step has one int32 for each parameter."""
    for rank in four:
        parameters, span = rank["map"]
        assert span == pytest.approx(seconds("allreduce", 4 * parameters, 4))
