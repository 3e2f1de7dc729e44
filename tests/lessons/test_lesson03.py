"""Lesson 03: halves on two GPUs, and a pipeline of processes, learn what one GPU learns."""

import json
import sys

import pytest
import torch
from commands import ROOT, planted, run_script, torchrun

from multigpu import proof, vgpu
from multigpu.models import CNN

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_ModelParallel as lesson

SCRIPT = ROOT / "scripts" / "PT_CNN_ModelParallel.py"
PIPELINE = ROOT / "scripts" / "PT_CNN_Pipeline.py"
FOLDER = ROOT / "lessons" / "03-model-parallel"
FLAGS = ("--epochs", 2, "--batch-size", 8, "--prove")

PADDING_COUNTS = """
pad = lesson.F.pad
lesson.F.pad = lambda x, by, value=0: pad(x, by, value=max(value, 0))
"""
NO_GRADIENT_COMES_BACK = """
stage = lesson.PipelineStage
stage.get_bwd_send_ops = lambda self, index: []
stage.get_bwd_recv_ops = lambda self, index: []
stage._retrieve_recv_grads = lambda self, index: (torch.zeros(2, 512),)
"""
MEAN_OVER_MICRO_BATCHES = """
original = lesson.schedule

def schedule(*args):
    pipeline = original(*args)
    pipeline.scale_grads = True
    return pipeline

lesson.schedule = schedule
"""
FAULTS = {
    "the padding counts": PADDING_COUNTS,
    "no gradient comes back": NO_GRADIENT_COMES_BACK,
    "GPipe's mean over micro-batches": MEAN_OVER_MICRO_BATCHES,
}


def batches(number: int, size: int):
    source = torch.Generator().manual_seed(5)
    for _ in range(number):
        yield (
            torch.rand(size, 1, 8, 8, generator=source),
            torch.randint(0, 10, (size,), generator=source),
        )


# ---- one process, two devices ----


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 10])
def test_halves_equal_one_device_after_each_step(micro_batches, two):
    """10 images: 3 micro-batches have 4, 4 and 2."""
    first, second = two
    torch.manual_seed(0)
    halves = lesson.Halves(first, second)
    torch.manual_seed(0)
    serial = CNN()
    optimizer = torch.optim.SGD(halves.parameters(), 0.05, momentum=0.9)
    serial_optimizer = torch.optim.SGD(serial.parameters(), 0.05, momentum=0.9)
    for images, labels in batches(5, 10):
        expected = lesson.step(serial, serial_optimizer, images, labels)
        images = images.to(first)
        labels = labels.to(second)
        loss = lesson.step(halves, optimizer, images, labels, micro_batches)
        assert abs(loss.item() - expected.item()) < 1e-6
        assert proof.difference(halves, serial) <= 1e-6


def test_the_layers_are_where_the_lesson_says(two):
    first, second = two
    halves = lesson.Halves(first, second)
    assert halves.conv1.weight.device == first
    assert halves.conv2.weight.device == first
    assert halves.fc1.weight.device == second
    assert halves.fc2.weight.device == second


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_the_run_equals_one_process(tmp_path, npz, micro_batches):
    """35 images in batches of 8: the last batch has 3, fewer than 4 micro-batches."""
    more = ("--micro-batches", micro_batches, "--out", tmp_path / "o")
    done = run_script(SCRIPT, "--data", npz(), *FLAGS, *more)
    assert done.returncode == 0, done.stdout
    assert "limit 1e-05: holds" in done.stdout
    saved = torch.load(tmp_path / "o" / "model.pt")
    assert all(weight.device.type == "cpu" for weight in saved.values())


def test_where_no_gradient_goes_back_the_proof_fails(tmp_path, npz, monkeypatch, capsys):
    def forward(self, images):
        x = torch.tanh(self.conv2(torch.tanh(self.conv1(images)))).detach().to(self.second)
        return self.fc2(torch.tanh(self.fc1(x.flatten(1))))

    monkeypatch.setattr(lesson.Halves, "forward", forward)
    flags = ("--data", npz(), *FLAGS, "--micro-batches", 2, "--out", tmp_path)
    try:
        # the optimizer skips weights without a gradient
        with pytest.raises(SystemExit):
            lesson.main(lesson.parse([str(flag) for flag in flags]))
    finally:
        vgpu.stop()
    assert "limit 1e-05: fails" in capsys.readouterr().out


def two_steps(model, first, last, batch: int = 320) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(2):
        images = torch.rand(batch, 1, 28, 28, device=first)
        labels = torch.zeros(batch, dtype=torch.long, device=last)
        lesson.step(model, optimizer, images, labels)


def test_too_large_for_one_device_in_the_second_step_and_not_for_two():
    with vgpu.running(1, memory="64MiB", compute=False) as (one,):
        with pytest.raises(torch.OutOfMemoryError):
            two_steps(CNN((1, 28, 28), hidden=320).to(one), one, one)
        assert vgpu.timeline().events[-1].phase == "backward"
        assert any(event.phase == "update" for event in vgpu.timeline().events), (
            "the first step went well"
        )
    with vgpu.running(2, memory="64MiB", compute=False) as (first, second):
        two_steps(lesson.Halves(first, second, (1, 28, 28), hidden=320), first, second)


def test_the_bubble_and_the_best_number_of_micro_batches():
    """Naive is slower than one GPU; 8 micro-batches are faster than 2 and than 32.

    On a free link the bubble of 4 micro-batches is that of unequal stages, more than the
    formula's, and it takes as long as the one on NVLink. With 8 the second GPU still waits.
    With 16 launches count, and the step is longer.
    """

    def simulate(micro_batches: int, halves: bool = True, link="NVLink2"):
        with vgpu.running(2, link=link, compute=False) as (first, second):
            if halves:
                model = lesson.Halves(first, second, (1, 28, 28), hidden=320)
                last = second
            else:
                model = CNN((1, 28, 28), hidden=320).to(first)
                last = first
            optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
            images = torch.empty(4096, 1, 28, 28, device=first)
            labels = torch.empty(4096, dtype=torch.long, device=last)
            for _ in range(2):
                began = vgpu.elapsed()
                lesson.step(model, optimizer, images, labels, micro_batches)
            return vgpu.elapsed() - began, vgpu.timeline(since=began)

    one_gpu, _ = simulate(1, halves=False)
    seconds = {}
    timelines = {}
    for micro_batches in (1, 2, 8, 32):
        seconds[micro_batches], timelines[micro_batches] = simulate(micro_batches)
    assert seconds[8] < seconds[2] < one_gpu < seconds[1]
    assert seconds[8] < seconds[32]
    for micro_batches, timeline in timelines.items():
        assert (timeline.idle(0) + timeline.idle(1)) / 2 > 1 / (micro_batches + 1)
    # naive: the two GPUs never compute at the same time
    assert timelines[1].busy(0) + timelines[1].busy(1) < 1
    assert timelines[8].busy(0) + timelines[8].busy(1) > 1

    seconds = {}
    shares = {}
    for link in ("NVLink2", vgpu.Link("free link", bandwidth=1e18, latency=0.0)):
        seconds[link], timeline = simulate(4, link=link)
        shares[link] = (timeline.breakdown(0)["bubble"] + timeline.breakdown(1)["bubble"]) / 2
    nvlink, free = shares
    longer, shorter = (timeline.busy(gpu) * seconds[free] for gpu in (0, 1))
    assert 1.3 < longer / shorter < 1.6
    # A step takes the longer stage, and one micro-batch of the shorter one.
    unequal = 1 - (longer + shorter) / (2 * (longer + shorter / 4))
    assert shares[free] == pytest.approx(unequal, abs=0.02)
    assert shares[free] > 1 / 5 + 0.05
    assert shares[nvlink] < shares[free] - 0.02
    milliseconds = [1e3 * seconds[link] * shares[link] for link in shares]
    assert milliseconds[0] == pytest.approx(milliseconds[1], rel=0.05)
    eight, with_8 = simulate(8, link=free)
    bubbles = [with_8.breakdown(gpu)["bubble"] for gpu in (0, 1)]
    assert bubbles[0] < 0.1 and 1 / 4 < bubbles[1] < 1 / 3
    assert with_8.breakdown(0)["launch"] < 0.02
    sixteen, with_16 = simulate(16, link=free)
    assert sixteen > 1.1 * eight and with_16.breakdown(0)["launch"] > 0.1
    assert timelines[32].busy(0) < 1 / 2 and timelines[32].breakdown(0)["launch"] > 1 / 4


# ---- one process per stage ----


@pytest.mark.parametrize(
    ("ranks", "schedule", "micro_batches"),
    [(2, "gpipe", 4), (2, "1f1b", 2), (3, "1f1b", 4), (4, "gpipe", 4)],
)
def test_the_pipeline_equals_one_process(tmp_path, npz, ranks, schedule, micro_batches):
    """35 images in batches of 8: the last batch is padded."""
    flags = ("--data", npz(), *FLAGS, "--schedule", schedule)
    more = ("--micro-batches", micro_batches, "--spawn", ranks, "--out", tmp_path / "o")
    done = run_script(PIPELINE, *flags, *more)
    assert done.returncode == 0, done.stdout
    assert "limit 1e-05: holds" in done.stdout
    assert f"{schedule} with {ranks} stages equals one process" in done.stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_the_proof_fails(tmp_path, npz, fault):
    path = planted(tmp_path, "PT_CNN_Pipeline", FAULTS[fault])
    more = ("--schedule", "gpipe", "--spawn", 2, "--out", tmp_path / "o")
    done = run_script(path, "--data", npz(), *FLAGS, *more)
    assert done.returncode == 1, done.stdout
    assert "limit 1e-05: fails" in done.stdout


# ---- a pipeline by hand, and its simulated time and memory ----

PIPELINES = """
import json, sys
sys.path[:0] = sys.argv[1:]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from experiments import FREE_LINK, equal_stages, joined, phases, pipelined_steps, shares
from PT_CNN_Pipeline import first_stage, last_stage, schedule, stage
from multigpu import launch
from multigpu.models import CNN

FORWARD, BACKWARD = ([f"{kind}{number}" for number in range(1, 9)] for kind in "FB")
ALTERNATING = [action for pair in zip(FORWARD, BACKWARD) for action in pair]
AHEAD = ["F1", *(action for pair in zip(FORWARD[1:], BACKWARD) for action in pair), "B8"]
ORDERS = {
    "gpipe": [" ".join(FORWARD + BACKWARD)] * 2,
    "1f1b": [" ".join(AHEAD), " ".join(ALTERNATING)],
    "naive": [" ".join(ALTERNATING)] * 2,
    "zigzag": ["F2 F1 F3 B1 B2 F8 B3 B8 F4 F5 F6 F7 B7 B6 B5 B4"] * 2,
}
IMAGES = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(64) % 10


def by_hand():
    world = launch.find_world()
    dist.init_process_group("gloo")
    results = {}
    for name, orders in ORDERS.items():
        torch.manual_seed(0)
        layers = stage(CNN(), world.rank, world.size)
        back = dist.new_group()
        if world.rank == 0:
            held = first_stage(layers, orders[0], IMAGES.chunk(8), back)
        else:
            held = last_stage(layers, orders[1], LABELS.chunk(8), back, (8, 512))
        results[name] = ([weight.grad / 64 for weight in layers.parameters()], held)
    return results


if __name__ == "__main__":
    ranks = launch.call(by_hand, 2)
    torch.manual_seed(0)
    serial = CNN()
    F.cross_entropy(serial(IMAGES), LABELS).backward()
    names = ("difference", "held", "ms", "shares", "phases", "peaks", "actions", "messages")
    found = {name: {} for name in (*names, "sends while computing")}
    for name in ORDERS:
        own = [gradient for rank in ranks for gradient in rank[name][0]]
        pairs = zip(own, serial.parameters(), strict=True)
        found["difference"][name] = max((a - b.grad).abs().max().item() for a, b in pairs)
        found["held"][name] = [rank[name][1] for rank in ranks]
    cases = {
        "gpipe": (stage, "gpipe", "NVLink2"),
        "1f1b": (stage, "1f1b", "NVLink2"),
        "gpipe, free": (stage, "gpipe", FREE_LINK),
        "1f1b, free": (stage, "1f1b", FREE_LINK),
        "gpipe, equal": (equal_stages, "gpipe", FREE_LINK),
        "1f1b, equal": (equal_stages, "1f1b", FREE_LINK),
        "gpipe by hand": (stage, ORDERS["gpipe"], "NVLink2"),
        "1f1b by hand": (stage, ORDERS["1f1b"], "NVLink2"),
        "naive, free": (stage, ORDERS["naive"], FREE_LINK),
    }
    by_hand = (first_stage, last_stage)
    by_rank = launch.call(pipelined_steps, 2, list(cases.values()), schedule, by_hand)
    for case, steps in zip(cases, zip(*by_rank)):
        timeline = joined(steps)
        found["ms"][case] = 1e3 * (timeline.end - timeline.start)
        found["shares"][case] = shares(timeline)
        found["peaks"][case] = [step.peak for step in steps]
        found["phases"][case] = phases(timeline)
        notes = [(event, timeline.notes.get(event)) for event in timeline.events]
        found["messages"][case] = sorted(
            (event.device, event.name, note)
            for event, note in notes
            if event.kind == "transfer"
        )
        found["sends while computing"][case] = sorted({
            send.device
            for send in timeline.events
            for event in timeline.events
            if send.name == "send" and event.kind == "compute" and event.device == send.device
            if event.start < send.end and send.start < event.end
        })
        # Each rank's micro-batches, in the order in which it begins with them.
        found["actions"][case] = [
            list(dict.fromkeys(
                event.phase[0].upper() + note
                for event, note in notes
                if note and event.phase != "update"
                if event.kind == "compute" and event.device == rank
            ))
            for rank in (0, 1)
        ]
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    program = tmp_path_factory.mktemp("pipelines") / "program.py"
    program.write_text(PIPELINES)
    done = run_script(program, FOLDER, ROOT / "scripts")
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_by_hand_any_order_has_the_serial_gradients(pipelines):
    assert len(pipelines["difference"]) == 4
    assert all(difference < 1e-7 for difference in pipelines["difference"].values())


@pytest.mark.slow
def test_1f1b_holds_two_micro_batches_and_gpipe_all(pipelines):
    gpipe, last_of_gpipe = pipelines["held"]["gpipe"]
    assert gpipe == last_of_gpipe == [*range(1, 9), *range(7, -1, -1)]
    most = {name: [max(held) for held in ranks] for name, ranks in pipelines["held"].items()}
    assert most["1f1b"] == [2, 1]
    assert most["naive"] == [1, 1]
    for ranks in pipelines["held"].values():
        assert all(held[-1] == 0 for held in ranks), "the pipeline is empty"


@pytest.mark.slow
def test_with_equal_stages_and_a_free_link_both_orders_have_the_formulas_bubble(pipelines):
    ms, bubble = pipelines["ms"], bubbles(pipelines)
    assert ms["gpipe, equal"] == pytest.approx(ms["1f1b, equal"], rel=1e-3)
    assert bubble["gpipe, equal"] == pytest.approx(1 / 9, abs=0.02)
    assert bubble["1f1b, equal"] == pytest.approx(1 / 9, abs=0.02)
    for order in ("gpipe", "1f1b"):
        parts = pipelines["shares"][f"{order}, equal"]
        assert parts["transfer"] < 0.001 and parts["launch"] < 0.003
    # Each rank holds one micro-batch at a time: half of the time it waits.
    assert bubble["naive, free"] == pytest.approx(0.5, abs=0.03)


@pytest.mark.slow
def test_with_unequal_stages_gpipe_waits_longer(pipelines):
    """A free link, and a first stage that is slower, forward and backward.

    In GPipe rank 0 waits for rank 1's forward and backward of one micro-batch. In 1F1B it
    waits twice for that, but computes a forward meanwhile, and later a backward.
    """
    first, last = pipelines["phases"]["gpipe, free"]
    assert first["forward"] > 1.1 * last["forward"]
    assert first["backward"] > 1.1 * last["backward"]
    both = [(rank["forward"] + rank["backward"]) / 8 for rank in (first, last)]
    gpipe = both[1]
    interleaved = 2 * both[1] - both[0]
    ms = pipelines["ms"]
    assert ms["gpipe, free"] - ms["1f1b, free"] == pytest.approx(gpipe - interleaved, rel=0.2)
    bubble = bubbles(pipelines)
    assert bubble["gpipe, free"] > bubble["1f1b, free"] + 0.01 > 1 / 9 + 0.03


def bubbles(found: dict) -> dict[str, float]:
    return {case: parts["bubble"] for case, parts in found["shares"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_by_hand_is_what_torchs_tool_does(pipelines, order):
    """Order and time are equal; the tool keeps 7 more buffers of 12.25 MiB on each rank."""
    assert pipelines["actions"][order] == pipelines["actions"][f"{order} by hand"]
    assert all(len(actions) == 16 for actions in pipelines["actions"][order])
    assert pipelines["ms"][order] == pytest.approx(pipelines["ms"][f"{order} by hand"], 1e-3)
    more = pipelines["peaks"][order][0] - pipelines["peaks"][f"{order} by hand"][0]
    assert more == pytest.approx(7 * 512 * 6272 * 4 / 2**20, abs=0.1)


@pytest.mark.slow
def test_1f1b_saves_memory_on_both_ranks(pipelines):
    for how in ("", " by hand"):
        gpipe, less = (pipelines["peaks"][order + how] for order in ("gpipe", "1f1b"))
        assert less[0] < 0.55 * gpipe[0]
        assert less[1] < 0.7 * gpipe[1]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_the_messages_say_what_they_carry(pipelines, order):
    """Also in 1F1B, where two messages go in opposite directions at the same time."""
    expected = [(0, "recv", "gradients"), (0, "send", "activations")]
    expected += [(1, "recv", "activations"), (1, "send", "gradients")]
    expected = [list(message) for message in expected for _ in range(8)]
    assert pipelines["messages"][order] == expected


@pytest.mark.slow
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_rank_0_computes_while_it_sends(pipelines, order):
    assert 0 in pipelines["sends while computing"][order]


# ---- mistakes ----


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        (SCRIPT, ("--micro-batches", 3), "split evenly over 3 micro-batches"),
        (SCRIPT, ("--micro-batches", 0), "from 1 up"),
        (SCRIPT, ("--lr", "3e38"), "lower --lr"),
        (PIPELINE, (), "2, 3 or 4 stages, not 1"),
        (PIPELINE, ("--spawn", 5), "2, 3 or 4 stages, not 5"),
        (PIPELINE, ("--spawn", 3, "--micro-batches", 2), "too few for 1F1B on 3 stages"),
        (PIPELINE, ("--spawn", 2, "--lr", "3e38"), "lower --lr"),
        (PIPELINE, ("--spawn", 2, "--data", "no.npz"), "no data file"),
        (PIPELINE, ("--spawn", 2, "--schedule", "zigzag"), "invalid choice"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, script, flags, words):
    batch = ("--batch-size", 64) if "--micro-batches" in flags else ()
    done = run_script(script, *flags, *batch, "--out", tmp_path / "out")
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("error: ") == 1
    assert words in done.stdout
    assert "Traceback" not in done.stdout
    assert not list(tmp_path.rglob("model.pt"))


def test_a_launcher_is_refused_where_one_process_has_all_gpus(tmp_path):
    done = torchrun(2, SCRIPT, "--out", tmp_path)
    assert done.returncode != 0, done.stdout
    assert done.stdout.count("is one process, and torchrun started 2") == 1


def test_ranks_that_read_other_data(tmp_path, npz):
    """As on nodes whose disks hold different files."""
    fault = "lesson.data.checksum = lambda train: os.environ['RANK']"
    path = planted(tmp_path, "PT_CNN_Pipeline", fault)
    flags = ("--data", npz(), "--spawn", 3, "--out", tmp_path / "o")
    done = run_script(path, *flags, timeout=60)
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("error: ") == 1
    (error,) = (line for line in done.stdout.splitlines() if line.startswith("error: "))
    for fact in ("training data", "rank 1", "rank 0"):
        assert fact in error


def test_a_rank_that_dies_ends_the_pipeline(tmp_path, npz):
    path = planted(tmp_path, "PT_CNN_Pipeline", "lesson.F.pad = None")
    flags = ("--data", npz(), "--spawn", 2, "--out", tmp_path / "o")
    done = run_script(path, *flags, timeout=60)
    assert done.returncode == 1, done.stdout
    assert "TypeError" in done.stdout
    assert not list(tmp_path.rglob("*.pt"))
