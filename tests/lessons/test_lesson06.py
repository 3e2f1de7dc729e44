"""Lesson 06: DDP over ranks with a model on two GPUs each learns what one GPU learns."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from commands import ROOT, SILENT_DDP, free_ports, planted, run_script
from torch import nn
from virtual_runs import virtual

import multigpu
from multigpu import prove
from multigpu.models import CNN

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_HybridParallel as script

SCRIPT = ROOT / "scripts" / "PT_CNN_HybridParallel.py"
PAGE = ROOT / "lessons" / "06-hybrid-parallel"
TORCHRUN = ("torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
# 35 images: the last batch has 3, and the sampler repeats an image.
FLAGS = ("--batch-size", 8, "--micro-batches", 3, "--epochs", 2)


def proof(path, data) -> prove.Proof:
    words = [*TORCHRUN, path, "--data", data, *FLAGS]
    return prove.run([str(word) for word in words], gpus=4, steps=6, timeout=100)


@pytest.mark.slow
def test_two_replicas_of_two_stages_learn_what_one_gpu_learns(in_forks, few_digits):
    found = proof(SCRIPT, few_digits())
    assert found.verdict == "holds", str(found)


@pytest.mark.slow
def test_without_an_all_reduce_the_proof_fails(in_forks, few_digits, tmp_path):
    found = proof(planted(tmp_path, "PT_CNN_HybridParallel", SILENT_DDP), few_digits())
    assert found.verdict == "fails", str(found)
    assert "step with their own gradients" in found.line


def test_loss_and_accuracy_are_those_of_one_process(few_digits, tmp_path):
    data = few_digits()
    torch.manual_seed(0)
    model = script.CNN()
    train, test = script.read_digits(data)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    expected = ""
    for epoch in range(2):
        total = 0.0
        order = torch.randperm(35, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(8):
            images, labels = train[rows]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows) / 35
        right = (model(test.tensors[0]).argmax(1) == test.tensors[1]).double().mean().item()
        expected += f"epoch {epoch + 1}: loss {total:.4f}, accuracy {right:.4f}\n"
    words = (*TORCHRUN, SCRIPT, "--data", data, *FLAGS, "--out", tmp_path)
    done = virtual(tmp_path, "--gpus", 4, *words, OMP_NUM_THREADS=1)
    assert expected in done.stdout, expected + done.stdout
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics == pytest.approx({"loss": total, "accuracy": right}, abs=1e-6)
    for name, weight in torch.load(tmp_path / "model.pt").items():
        assert torch.allclose(weight, model.state_dict()[name], atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "Try: multigpu virtual --gpus 4 torchrun --nproc-per-node 2"),
        (("--data", "no.npz"), "No such file"),
        (("--out", SCRIPT / "folder"), "Not a directory"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, flags, words):
    done = run_script(SCRIPT, *flags, cwd=tmp_path)
    assert done.returncode != 0
    assert words in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stdout


def test_under_srun_too_a_batch_that_the_ranks_cannot_share_is_one_sentence(tmp_path):
    rank = {"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 1, "SLURM_LOCALID": 0}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    words = ("--gpus", 2, SCRIPT, "--batch-size", 0)
    done = virtual(tmp_path, *words, **rank, **address)
    assert "error: --batch-size must be a multiple of" in done.stdout
    assert "Traceback" not in done.stdout


def test_in_the_shell_of_a_job_which_is_no_rank_it_names_torchrun(tmp_path):
    done = virtual(tmp_path, "--gpus", 2, SCRIPT, SLURM_PROCID=0, SLURM_LOCALID=0)
    assert "It needs torchrun and two GPUs for each rank." in done.stdout
    assert "Traceback" not in done.stdout


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [weight.grad.cpu() for weight in model.parameters()]


@pytest.mark.parametrize("in_flight", [(1, 1), (2, 1), (3, 1), (4, 4), (5, 3)])
def test_overlapped_orders_have_the_serial_gradients(experiments, in_flight):
    """Two ranks one after the other: the sum of their gradients is the serial gradient."""
    torch.manual_seed(0)
    serial = CNN()
    images, labels = torch.randn(32, 1, 8, 8), torch.arange(32) % 10
    F.cross_entropy(serial(images), labels).backward()
    with multigpu.gpus(2, gpu="V100-16GB") as gpus:
        torch.manual_seed(0)
        stages = experiments.cnn_stages(CNN(), 7, gpus, 4)
        order = experiments.Overlapped(stages, in_flight)
        for rows, classes in zip(images.chunk(2), labels.chunk(2), strict=True):
            order.backward(rows.to(gpus[0]), classes.to(gpus[1]), ranks=2)
        pairs = zip(gradients(stages), gradients(serial), strict=True)
        assert max((a - b).abs().max().item() for a, b in pairs) < 1e-7


@pytest.mark.parametrize("in_flight", [None, (4, 4), (2, 1), (3, 1)])
def test_overlapped_transfers_run_beside_computing_and_in_1f1b_beside_each_other(
    experiments, in_flight
):
    """None is GPipe with blocking copies, as in the script."""
    nodes = {"gpus_per_node": 1, "between_nodes": "Ethernet10", "shapes_only": True}
    with multigpu.gpus(2, memory="32GiB", **nodes) as gpus:
        stages, images, labels = experiments._cnn("large", gpus, 2_048)
        began = multigpu.elapsed()
        if in_flight:
            experiments.Overlapped(stages, in_flight).backward(images, labels)
        else:
            F.cross_entropy(stages(images), labels).backward()
        events = multigpu.timeline(since=began).events

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
    whole = experiments.one_node(stages=1)
    assert "CUDA out of memory" in whole.error and "16.00 GiB" in whole.error
    assert whole.seconds is None
    halves = experiments.one_node()
    assert halves.error == ""
    # The peak is in backward. The optimizer's step and the end of forward need less.
    assert all(a > b + 1 for a, b in zip(halves.peak, halves.update, strict=True))
    assert all(1 < gib < 2 for gib in halves.forward)
    # More than half of a V100 on each GPU: neither stage is an empty one.
    assert all(8 < gib < 16 for gib in halves.peak) and len(halves.peak) == 2
    large = experiments.one_node(stages=1, memory="40GiB")
    (held,) = large.held
    weights = held["weights"]
    assert held["gradients"] == pytest.approx(weights)
    assert held["optimizer"] == pytest.approx(2 * weights, rel=1e-3)
    assert sum(held.values()) > 16
    assert sum(half["weights"] for half in halves.held) == pytest.approx(weights, rel=1e-3)


@pytest.mark.slow
def test_the_network_and_the_images_decide_which_layout_is_faster(experiments):
    slow, fast = experiments.layouts("large"), experiments.layouts("large", "HDR200")
    one = experiments.one_node(images=8_192, micro_batches=8).speed
    steps = [*slow.inside, *slow.across, *fast.inside, *fast.across]
    assert all(8 < gib < 16 for step in steps for gib in step.peak)
    assert slow.ratio < 0.85
    assert slow.inside[0].speed < one < fast.inside[0].speed < 2 * one
    timeline = experiments.joined(slow.inside)
    assert timeline.lanes == experiments.LANES
    assert all(timeline.busy(lane, "collective") > 0.6 for lane in range(4))
    # With half of the images the activations take less time than the gradients.
    assert experiments.layouts("large", images=4_096).ratio > 1.3


@pytest.mark.slow
def test_few_tokens_are_faster_across_nodes_and_many_are_faster_inside(experiments):
    """With many tokens more of the all-reduce is hidden, and nothing of the activations."""
    few = experiments.layouts("transformer")
    many = experiments.layouts("transformer", **experiments.MANY_TOKENS)
    assert few.ratio > 2.5 and many.ratio < 0.96
    alone = experiments.one_node(model="transformer", images=8_192, micro_batches=8)
    assert few.across[0].speed > 1.5 * alone.speed
    (few_inside, few_across), (many_inside, many_across) = few.waits, many.waits
    assert few_across < few_inside / 10
    assert many_inside < 0.7 * few_inside
    assert many_inside < 0.7 * many_across


@pytest.mark.slow
def test_replicas_are_faster_than_stages_and_need_less_memory_on_a_gpu(experiments):
    """GPipe, a model that fits: a stage has the activations of twice as many images."""
    ((stages, _),) = experiments.two_nodes(("small", experiments.INSIDE, "HDR200"))
    ((replica, *_),) = experiments.two_nodes(("small", "four replicas", "HDR200"))
    assert replica.speed > 1.3 * stages.speed
    assert max(stages.peak) > 1.05 * max(replica.peak)


@pytest.mark.slow
def test_with_overlap_the_order_and_the_network_decide_which_layout_is_faster(
    experiments, monkeypatch
):
    monkeypatch.setitem(experiments.ORDERS, "3 in flight", (3, 1))
    speeds = experiments.overlapped()
    ratio = {case: across / inside for case, (inside, across) in speeds.items()}
    # With 10 Gb/s across is slower with GPipe, and faster with 1F1B.
    assert 0.9 < ratio["GPipe", "Ethernet10"] < 1
    assert 1.1 < ratio["1F1B", "Ethernet10"] < ratio["3 in flight", "Ethernet10"] - 0.1
    assert ratio["GPipe", "Ethernet25"] > 1.1 and ratio["1F1B", "Ethernet25"] > 1.1
    assert 1 < ratio["1F1B", "HDR200"] < 1.05
    alone = experiments.one_node_overlapped()
    assert speeds["3 in flight", "Ethernet10"][1] < alone
    assert alone < speeds["1F1B", "Ethernet25"][1] < 1.2 * alone
    assert 1.5 * alone < speeds["1F1B", "HDR200"][1]


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
