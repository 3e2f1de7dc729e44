"""Lesson 06: DDP over a model on two GPUs learns what one GPU learns."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from commands import ROOT, SILENT_DDP, planted, run_script
from torch import nn

from multigpu import vgpu
from multigpu.models import CNN

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_HybridParallel as lesson

SCRIPT = ROOT / "scripts" / "PT_CNN_HybridParallel.py"
PAGE = ROOT / "lessons" / "06-hybrid-parallel"
FLAGS = ("--epochs", 2, "--prove")

MICRO_BATCH_LOST = """
cat = lesson.torch.cat
lesson.torch.cat = lambda outputs: cat([*outputs[:-1], outputs[-1].detach()])
"""
REPEATS_COUNT = """
def all_real(images, batch, rank, index, rows, device=None):
    return torch.ones(rows, dtype=torch.bool, device=device)

lesson.data.real_rows = all_real
"""
PRINTS_ITS_GPUS = """
gpus = lesson.multigpu.gpus

def asked(count, world):
    print(f"rank {world.rank} asks for {count}", flush=True)
    return gpus(count, world)

lesson.multigpu.gpus = asked
"""
FAULTS = {
    "no sum of gradients": SILENT_DDP,
    "a micro-batch is lost": MICRO_BATCH_LOST,
    "repeated images count": REPEATS_COUNT,
}


@pytest.mark.parametrize(
    ("ranks", "batch", "micro_batches"), [(1, 8, 2), (2, 8, 1), (2, 12, 3), (3, 12, 2)]
)
def test_replicas_of_stages_equal_one_process(tmp_path, npz, ranks, batch, micro_batches):
    """35 images: the last batch is uneven, and the sampler repeats some."""
    flags = ("--data", npz(), *FLAGS, "--batch-size", batch, "--spawn", ranks)
    more = ("--micro-batches", micro_batches, "--out", tmp_path / "o")
    done = run_script(SCRIPT, *flags, *more)
    assert done.returncode == 0, done.stdout
    assert "limit 1e-05: holds" in done.stdout
    assert done.stdout.count("This machine has no GPU") == 1
    assert "Warning" not in done.stdout
    metrics = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert metrics["devices"] == 2 * ranks
    assert metrics["device"] == "vgpu"
    assert metrics["world_size"] == ranks
    saved = torch.load(tmp_path / "o" / "model.pt")
    assert all(weight.device.type == "cpu" for weight in saved.values())


@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_the_proof_fails(tmp_path, npz, fault):
    path = planted(tmp_path, "PT_CNN_HybridParallel", FAULTS[fault])
    more = ("--batch-size", 8, "--spawn", 2, "--out", tmp_path / "o")
    done = run_script(path, "--data", npz(), *FLAGS, *more)
    assert done.returncode == 1, done.stdout
    assert "limit 1e-05: fails" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--spawn", 2, "--batch-size", 6), "over 2 ranks × 2 micro-batches"),
        (("--spawn", 2, "--micro-batches", 0), "from 1 up"),
        (("--spawn", 2, "--lr", "3e38"), "lower --lr"),
        (("--spawn", 2, "--data", "no.npz"), "no data file"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, flags, words):
    done = run_script(SCRIPT, *flags, "--out", tmp_path / "out")
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("error: ") == 1
    assert words in done.stdout
    assert "Traceback" not in done.stdout
    assert not list(tmp_path.rglob("model.pt"))


def test_the_lesson_asks_for_its_ranks_own_gpus(tmp_path, npz):
    path = planted(tmp_path, "PT_CNN_HybridParallel", PRINTS_ITS_GPUS)
    flags = ("--data", npz(), "--epochs", 1, "--batch-size", 8)
    done = run_script(path, *flags, "--spawn", 2, "--out", tmp_path / "o")
    assert "rank 0 asks for 2" in done.stdout, done.stdout
    assert "rank 1 asks for 2" in done.stdout, done.stdout


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [weight.grad.cpu() for weight in model.parameters()]


def test_twins_have_the_serial_gradients():
    """Two replicas of two stages, by hand. A replica's own gradients are far away."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 1, 8, 8, generator=generator)
    labels = torch.arange(8)

    def new_model(kind: type, *placement: object) -> nn.Module:
        torch.manual_seed(0)
        return kind(*placement)

    serial = new_model(CNN)
    F.cross_entropy(serial(images), labels).backward()
    with vgpu.running(4) as gpus:
        replicas = [new_model(lesson.Halves, *gpus[i : i + 2], 2) for i in (0, 2)]
        for replica, rows, classes in zip(
            replicas, images.chunk(2), labels.chunk(2), strict=True
        ):
            outputs = replica(rows.to(replica.first))
            F.cross_entropy(outputs, classes.to(replica.second)).backward()
        own = gradients(replicas[0])
        lesson.average_twins(replicas)
        averaged = [gradients(replica) for replica in replicas]
        devices = [weight.grad.device for weight in replicas[1].parameters()]
        assert set(devices) == set(gpus[2:])

    def difference(found: list[torch.Tensor]) -> float:
        pairs = zip(found, gradients(serial), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs)

    assert all(difference(found) < 1e-7 for found in averaged)
    assert difference(own) > 1e-3


@pytest.mark.parametrize("in_flight", [(1, 1), (2, 1), (3, 1), (4, 4), (5, 3)])
def test_overlapped_orders_have_the_serial_gradients(experiments, in_flight):
    """Two ranks one after the other: the sum of their gradients is the serial gradient."""
    torch.manual_seed(0)
    serial = CNN()
    images, labels = torch.randn(32, 1, 8, 8), torch.arange(32) % 10
    F.cross_entropy(serial(images), labels).backward()
    with vgpu.running(2) as gpus:
        torch.manual_seed(0)
        model = lesson.Halves(*gpus, 4, cut=3)
        order = experiments.Overlapped(model, in_flight)
        for rows, classes in zip(images.chunk(2), labels.chunk(2), strict=True):
            order.backward(rows.to(gpus[0]), classes.to(gpus[1]), ranks=2)
        pairs = zip(gradients(model), gradients(serial), strict=True)
        assert max((a - b).abs().max().item() for a, b in pairs) < 1e-7


@pytest.mark.parametrize("in_flight", [None, (4, 4), (2, 1), (3, 1)])
def test_overlapped_transfers_run_beside_computing_and_in_1f1b_beside_each_other(
    experiments, in_flight
):
    """None is the lesson's class Halves: GPipe with blocking copies."""
    nodes = {"gpus_per_node": 1, "between_nodes": "Ethernet10"}
    with vgpu.running(2, gpu="V100-16GB", compute=False, **nodes) as gpus:
        with torch.device("meta"):
            model = lesson.Halves(*gpus, 4, **experiments.LARGE, cut=3)
        images = torch.empty(2_048, 1, 28, 28, device=gpus[0])
        labels = torch.empty(2_048, dtype=torch.long, device=gpus[1])
        began = vgpu.elapsed()
        if in_flight:
            experiments.Overlapped(model, in_flight).backward(images, labels)
        else:
            F.cross_entropy(model(images), labels).backward()
        events = vgpu.timeline(since=began).events

    def some_overlap(first: list, second: list) -> bool:
        return any(a.start < b.end and b.start < a.end for a in first for b in second)

    large = [e for e in events if e.kind == "transfer" and e.end - e.start > 1e-2]
    there, back = ([e for e in large if e.device == gpu] for gpu in (0, 1))
    assert len(there) == len(back) == 4
    assert some_overlap(there, back) == (in_flight in [(2, 1), (3, 1)])
    for gpu, own in enumerate((there, back)):
        computing = [e for e in events if e.device == gpu and e.kind == "compute"]
        assert computing and some_overlap(own, computing) == (in_flight is not None)


def test_a_replica_of_the_large_model_fits_only_in_two_stages(experiments):
    whole = experiments.one_process(None)
    assert "vgpu out of memory" in whole.error and "16.00 GiB" in whole.error
    assert whole.seconds is None
    halves = experiments.one_process(lesson.Halves)
    assert halves.error == ""
    # The peak is in backward. The optimizer's step and the end of forward need less.
    assert all(a > b + 1 for a, b in zip(halves.peak, halves.update, strict=True))
    assert all(1 < gib < 2 for gib in halves.forward)
    # More than half of a V100 on each GPU: neither stage is an empty one.
    assert all(8 < gib < 16 for gib in halves.peak) and len(halves.peak) == 2
    large = experiments.one_process(None, memory="40GiB")
    (held,) = large.held
    weights = held["weights"]
    assert held["gradients"] == pytest.approx(weights)
    assert held["optimizer"] == pytest.approx(2 * weights, rel=1e-3)
    assert sum(held.values()) > 16
    assert sum(half["weights"] for half in halves.held) == pytest.approx(weights, rel=1e-3)


STEPS = """
import json, sys
sys.path[:0] = sys.argv[1:]
from experiments import joined, layout_steps, one_process, overlapped_steps
from PT_CNN_HybridParallel import Halves
from multigpu import launch

if __name__ == "__main__":
    layouts = ("stages inside nodes", "stages across nodes")
    cases = [("large", layout, net) for net in ("Ethernet10", "HDR200") for layout in layouts]
    cases.append(("small", "stages inside nodes", "HDR200"))
    by_rank = launch.call(layout_steps, 2, cases, Halves)
    replicas = launch.call(layout_steps, 4, [("small", "four replicas", "HDR200")], Halves)
    alone = {"images": 8_192, "micro_batches": 8}
    one = one_process(Halves, **alone)
    half = launch.call(layout_steps, 2, cases[:2], Halves, images=4_096)
    timeline = joined([steps[0] for steps in by_rank])
    blocks = [("transformer", layout, "Ethernet10") for layout in layouts]
    blocks = [*launch.call(layout_steps, 2, blocks, Halves)[0]]
    blocks.append(one_process(Halves, model="transformer", **alone))
    orders = {"GPipe": (4, 4), "1F1B": (2, 1), "3 in flight": (3, 1), "1 in flight": (1, 1)}
    nets = ("Ethernet10", "Ethernet25", "RoCE100", "HDR200")
    hidden = {}
    for name, order in orders.items():
        overlapped = [(order, layout, net) for net in nets for layout in layouts]
        found = launch.call(overlapped_steps, 2, overlapped, Halves)[0]
        hidden[name] = {net: found[2 * i : 2 * i + 2] for i, net in enumerate(nets)}
    overlapped = [(orders["1F1B"], *cases[0][1:])]
    one_1f1b = launch.call(overlapped_steps, 1, overlapped, Halves, micro_batches=8)[0]
    print(json.dumps({
        "hidden": hidden,
        "one, 1F1B": one_1f1b[0],
        "transformer": [step.images / step.seconds for step in blocks],
        "speeds": [step.images / step.seconds for step in by_rank[0]],
        "half": [step.images / step.seconds for step in half[0]],
        "peaks": [step.peak for steps in by_rank for step in steps[:4]],
        "replicas": replicas[0][0].images / replicas[0][0].seconds,
        "one": one.images / one.seconds,
        "lanes": timeline.lanes,
        "all-reduce": [timeline.busy(lane, "collective") for lane in range(4)],
    }))
"""


@pytest.mark.slow
def test_the_network_decides_whether_a_second_node_and_which_layout_helps(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(STEPS)
    done = run_script(program, PAGE, ROOT / "scripts")
    found = json.loads(done.stdout.splitlines()[-1])
    slow, slow_across, fast, fast_across, small = found["speeds"]
    assert all(8 < gib < 16 for peaks in found["peaks"] for gib in peaks)
    assert slow > 1.15 * slow_across
    # With half of the images the activations take less time than the gradients.
    half, half_across = found["half"]
    assert half_across > 1.3 * half
    assert fast > fast_across
    # Across against inside, with transfers that overlap with computing. With 10 Gb/s across is
    # slower with GPipe, faster with 1F1B, and more so with 3 micro-batches in flight.
    hidden = found["hidden"]
    ratio = {
        name: {net: across[0] / inside[0] for net, (inside, across) in by_net.items()}
        for name, by_net in hidden.items()
    }
    assert ratio["1 in flight"]["Ethernet10"] < 0.9 < ratio["GPipe"]["Ethernet10"] < 1
    assert 1.1 < ratio["1F1B"]["Ethernet10"] < ratio["3 in flight"]["Ethernet10"] - 0.1
    assert all(
        hidden["1F1B"][net][0][0] < 1.02 * hidden["GPipe"][net][0][0]
        for net in hidden["GPipe"]
    )
    assert ratio["GPipe"]["Ethernet25"] > 1.1 and ratio["1F1B"]["Ethernet25"] > 1.1
    assert 1 < ratio["1F1B"]["HDR200"] < 1.05
    across = {name: by_net["RoCE100"][1][0] for name, by_net in hidden.items()}
    assert min(across["GPipe"], across["3 in flight"]) > across["1F1B"]
    peaks = {name: by_net["Ethernet10"][1][1] for name, by_net in hidden.items()}
    assert peaks["1 in flight"] < peaks["1F1B"] < peaks["3 in flight"] < 13
    # The same images on one node, in 8 micro-batches: faster than two nodes with 10 Gb/s, a
    # little slower with 25 Gb/s and stages across.
    alone = found["one, 1F1B"][0]
    one_f_one_b = {net: across[0] for net, (_, across) in hidden["1F1B"].items()}
    assert max(by_net["Ethernet10"][1][0] for by_net in hidden.values()) < alone
    assert alone < one_f_one_b["Ethernet25"] < 1.2 * alone < one_f_one_b["HDR200"] / 1.3
    # GPipe with blocking copies, too.
    assert slow < found["one"] < fast < 2 * found["one"]
    # A transformer has few activations where it is cut.
    inside, across, one_node = found["transformer"]
    assert across > 2.5 * inside and across > 1.5 * one_node > 1.5 * inside
    assert found["replicas"] > 1.3 * small
    assert found["lanes"] == [f"node {node}, GPU {gpu}" for node in (0, 1) for gpu in (0, 1)]
    assert all(share > 0.6 for share in found["all-reduce"])


ACROSS = """
import json
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from multigpu import launch
from multigpu.models import CNN

PIPELINES = ((0, 2), (1, 3))  # ranks 0 and 1 are on the first node, 2 and 3 on the second
TWINS = ((0, 1), (2, 3))

def new_stages():
    torch.manual_seed(0)
    model = CNN()
    first = nn.Sequential(model.conv1, nn.Tanh(), model.conv2, nn.Tanh(), nn.Flatten())
    return [first, nn.Sequential(model.fc1, nn.Tanh(), model.fc2)]

def step(images, labels):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [[dist.new_group(ranks) for ranks in lists] for lists in (PIPELINES, TWINS)]
    number, replica = rank // 2, rank % 2
    own = new_stages()[number]
    stage = PipelineStage(own, number, 2, torch.device("cpu"), group=groups[0][replica])
    loss = nn.CrossEntropyLoss(reduction="sum")
    schedule = Schedule1F1B(stage, 4, loss_fn=loss, scale_grads=False)
    if number == 0:
        schedule.step(images[replica])
    else:
        schedule.step(target=labels[replica])
    for weight in own.parameters():
        dist.all_reduce(weight.grad, group=groups[1][number])
    gradients = [weight.grad / sum(map(len, labels)) for weight in own.parameters()]
    dist.destroy_process_group()
    return gradients

if __name__ == "__main__":
    torch.manual_seed(1)
    images, labels = torch.randn(32, 1, 8, 8), torch.arange(32) % 10
    serial = nn.Sequential(*new_stages())
    F.cross_entropy(serial(images), labels).backward()
    by_rank = launch.call(step, 4, images.chunk(2), labels.chunk(2))
    expected = [weight.grad for weight in serial.parameters()]
    for ranks in PIPELINES:
        found = [gradient for rank in ranks for gradient in by_rank[rank]]
        pairs = zip(found, expected, strict=True)
        print(json.dumps([max((a - b).abs().max().item() for a, b in pairs)]))
"""


def test_stages_across_nodes_are_ranks_that_send_and_twins_have_a_group(tmp_path):
    """Four CPU processes: two pipelines of two ranks have the gradients of one process."""
    program = tmp_path / "program.py"
    program.write_text(ACROSS)
    done = run_script(program)
    assert done.returncode == 0, done.stdout
    differences = [json.loads(line) for line in done.stdout.splitlines() if line[0] == "["]
    assert len(differences) == 2
    assert all(found < 1e-6 for (found,) in differences), differences


SHARDED = """
import json, sys
sys.path[:0] = sys.argv[1:]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from experiments import layout_steps
from PT_CNN_HybridParallel import Halves
from multigpu import launch

def shard_weights(model, way):
    shape = (4,) if way == "FSDP over four GPUs" else (2, 2)
    mesh = init_device_mesh("vgpu", shape, mesh_dim_names=("nodes", "GPUs")[-len(shape):])
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

if __name__ == "__main__":
    stages = [("large", "stages inside nodes", net) for net in ("Ethernet10", "HDR200")]
    ways = ("FSDP over four GPUs", "FSDP inside nodes")
    cases = [("large", way, net) for net in ("Ethernet10", "HDR200") for way in ways]
    by_stages = launch.call(layout_steps, 2, stages, Halves)[0]
    by_rank = launch.call(layout_steps, 4, cases, Halves, shard=shard_weights)
    by_count = {}
    for count in (2, 4, 8, 16):
        more = {"micro_batches": count, "memory": "32GiB"}
        by_count[count] = launch.call(layout_steps, 2, stages, Halves, **more)[0]
    too_many = launch.call(layout_steps, 2, stages[:1], Halves, micro_batches=8)
    print(json.dumps({
        "stages": [step.images / step.seconds for step in by_stages],
        "sharded": [step.images / step.seconds for step in by_rank[0]],
        "by count": {
            count: [step.images / step.seconds for step in steps]
            for count, steps in by_count.items()
        },
        "peak": {count: max(steps[1].peak) for count, steps in by_count.items()},
        "error": too_many[0][0].error,
        "peaks": [[step.peak[0] for step in steps] for steps in by_rank],
    }))
"""


@pytest.mark.slow
def test_fsdp_is_faster_than_stages_unless_weights_cross_a_slow_network(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SHARDED)
    done = run_script(program, PAGE, ROOT / "scripts")
    found = json.loads(done.stdout.splitlines()[-1])
    slow, fast = found["stages"]
    slow_four, slow_nodes, fast_four, fast_nodes = found["sharded"]
    assert slow_four < 0.7 * slow < slow < slow_nodes / 1.1
    assert min(fast_four, fast_nodes) > 1.2 * fast
    assert fast_four > fast_nodes
    # Whatever the number of micro-batches. The fastest does not fit into 16 GiB.
    for slow_count, fast_count in found["by count"].values():
        assert slow_count < slow_nodes and fast_count < fast_nodes
    fastest = max(found["by count"], key=lambda count: found["by count"][count][1])
    assert fastest == "8" and found["peak"]["4"] < 16 < found["peak"]["8"]
    assert "out of memory" in found["error"]
    # Each GPU keeps a quarter of 16.5 GiB or a half, and in backward the weights and gradients
    # of a layer. No GPU has the whole model.
    for four, nodes, *_ in found["peaks"]:
        assert 16.5 / 4 + 4 < four < nodes - 3 and 16.5 / 2 + 4 < nodes < 16
