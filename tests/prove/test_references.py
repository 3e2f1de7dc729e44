"""What prove does to a reference: its batch, its last step, its GPUs, its random rows.

`make test` proves one program for each; ALL_PROOFS=1, `make test-prove`, proves all.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import right_cases
import wrong_cases

from multigpu import prove
from multigpu.prove.inside import randomness

MORE = pytest.mark.skipif("ALL_PROOFS" not in os.environ, reason="make test-prove runs it")

# A step of both optimizers; the replicas of the function data_parallel have a BatchNorm.
GAN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width, result):
        super().__init__()
        layers = nn.Linear(width, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, result)
        self.main = nn.Sequential(*layers)

    def forward(self, x):
        return nn.parallel.data_parallel(self.main, x, range(2))


torch.manual_seed(0)
generator, judge = Net(4, 5).cuda(), Net(5, 1).cuda()
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (judge, generator)]
made = generator(torch.randn(8, 4).cuda())
(judge(torch.randn(8, 5).cuda()).sigmoid() - judge(made.detach())).mean().backward()
optimizers[0].step()
judge(made).sigmoid().mean().backward()
optimizers[1].step()
"""

# A replica returns its loss.
WITH_LOSS = """
class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y)
"""

LOADER = """
from torch.utils.data import DataLoader, DistributedSampler

x = torch.randn(32, 24)
sampler = DistributedSampler(x, num_replicas=dp_size, rank=dp_rank)
loader = DataLoader(x, batch_size=4, sampler=sampler)
"""

# Pipelines of two stages share the data.
PIPELINES = """
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

pipelines = int(os.environ["WORLD_SIZE"]) // 2
mesh = init_device_mesh("cpu", (pipelines, 2), mesh_dim_names=("dp", "pp"))
dp, place = mesh["dp"].size(), mesh["pp"].get_local_rank()
torch.manual_seed(0)
stages = [nn.Sequential(nn.Linear(10, 24), nn.Tanh()), nn.Sequential(nn.Linear(24, 3))]
module = stages[place]
stage = PipelineStage(module, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
schedule = ScheduleGPipe(stage, 2, loss_fn=F.cross_entropy)
data = TensorDataset(torch.randn(48, 10), torch.randint(0, 3, (48,)))
sampler = DistributedSampler(data, num_replicas=dp, rank=mesh["dp"].get_local_rank())
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
for x, y in DataLoader(data, batch_size=8, sampler=sampler):
    optimizer.zero_grad()
    schedule.step(x) if place == 0 else schedule.step(target=y)
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
        parameter.grad /= dp
    optimizer.step()
dist.destroy_process_group()
"""

# Batches are read under no_grad, and positions go into the model, one row for all rows.
POSITIONS = """
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(16, 16)
        self.head = nn.Linear(16, 50)

    def forward(self, ids, places):
        return self.head(torch.tanh(self.words(ids) + self.places(places)))


model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randint(0, 50, (int(sys.argv[1]), 16))
loader = DataLoader(x, batch_size=2, sampler=DistributedSampler(x, drop_last=True))
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    batches = iter(loader)
    for _ in range(len(loader)):
        with torch.no_grad():
            ids = next(batches)
        logits = model(ids, torch.arange(16).unsqueeze(0))
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        optimizer.step()
"""

# The rate grows with the rows that a step of all ranks reads, or with the ranks alone.
SCALED = (wrong_cases.PROGRAMS / "ddp.py").read_text()
for old, new in (
    ("batch_size=BATCH // world,", "batch_size=own,"),
    ("ROWS, BATCH, EPOCHS = 128, 32, 3\n", "ROWS, EPOCHS, own = 128, 3, int(sys.argv[2])\n"),
    ("import torch\n", "import sys\n\nimport torch\n"),
):
    assert old in SCALED
    SCALED = SCALED.replace(old, new, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "kind"), [("0.1 * own * world / 32", None), ("0.1 * world", "learning_rate")]
)
def test_a_rate_that_grows_with_the_batch(proved: Callable, rate: str, kind: str) -> None:
    proof = proved(SCALED.replace("lr=0.1,", f"lr={rate},"), "--batch-size", "16")
    assert (proof.cause and proof.cause.kind) == kind, str(proof)
    assert proof.verdict == ("fails" if kind else "holds"), str(proof)
    assert ("--batch-size 32" in "".join(proof.notes)) and (kind is None) == (
        "learning rate depends on" in "".join(proof.notes)
    ), str(proof)


@MORE
@pytest.mark.slow
def test_pipelines_that_each_read_a_batch(proved: Callable) -> None:
    """Two pipelines of two stages, against one, whose first step reads a micro-batch twice."""
    proof = proved(PIPELINES, ranks=4, against=2)
    assert proof.verdict == "holds" and "multiplied by 2" in "".join(proof.notes), str(proof)


@MORE
@pytest.mark.slow
def test_hybrid_shards_that_each_read_a_batch(proved: Callable) -> None:
    """A mesh of 2 × 2 ranks, each with rows of its own: four parts of a batch."""
    text = (Path(right_cases.__file__).parent / "right" / "fsdp2.py").read_text()
    loader = LOADER.replace("num_replicas=dp_size, rank=dp_rank", "shuffle=False")
    for old, new in (
        ("rows = torch.randn(6, args.accumulate, 16, 8)\n", loader.replace("32, 24", "96, 8")),
        ("for step in range(6):\n", "for step, rows in enumerate(loader):\n"),
        ("rows[step, i][rank::world].to(kind)", "rows.to(kind)"),
    ):
        assert old in text
        text = text.replace(old, new)
    proof = proved(text, "--hybrid", ranks=4)
    assert proof.verdict == "holds" and "multiplied by 4" in "".join(proof.notes), str(proof)


@pytest.mark.slow
def test_weights_in_16_bit_round_otherwise(proved: Callable) -> None:
    """Their reference's second run differs from the first, though DTensors are not split."""
    text = (Path(right_cases.__file__).parent / "right" / "two_d.py").read_text()
    assert text.count(".to(kind)") == 2
    proof = proved(text.replace(".to(kind)", ".to(kind, torch.bfloat16)"), steps=2)
    assert proof.verdict == "holds", str(proof)
    for step in proof.comparison.steps:
        band, reference = step.band[0], step.reference[0]
        assert np.linalg.norm(band.after - reference.after) > 0
        assert np.linalg.norm(band.gradients - reference.gradients) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        # The last batch of a rank has one row.
        pytest.param("18", "equal 1 rank in 10 steps", marks=MORE),
        ("19", "the ranks read 2 rows, and one GPU 3: DistributedSampler(drop_last=True)"),
        pytest.param(
            "17", "the ranks are in epoch 2, and one GPU reads 1 row of epoch 1", marks=MORE
        ),
    ],
)
def test_the_end_of_an_epoch(proved: Callable, rows: str, said: str) -> None:
    proof = proved(POSITIONS, rows)
    assert said in proof.line, str(proof)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "ending"),
    [
        ("1e-2", ": holds"),
        pytest.param("1e-2 * dp_size", "and 0.01 in the reference: fails", marks=MORE),
    ],
)
def test_pairs_that_each_read_a_batch(proved: Callable, rate: str, ending: str) -> None:
    """Two pairs with 4 rows each, against one pair, whose batch becomes 8 rows, not 16.

    The loader gives each pair a part of the data, and both ranks of a pair the same.
    """
    text = (Path(right_cases.__file__).parent / "right" / "two_d.py").read_text()
    for old, new in (
        ("x = torch.randn(6, 16, 24)\n", LOADER),
        ("for step in range(6):\n", "for step, rows in enumerate(loader):\n"),
        ("rows = x[step].chunk(dp_size)[dp_rank].to(kind)", "rows = rows.to(kind)"),
        ("lr=1e-2", f"lr={rate}"),
    ):
        assert old in text
        text = text.replace(old, new)
    proof = proved(text, ranks=4, against=2)
    assert proof.line.endswith(ending), str(proof)
    assert "multiplied by 2" in "".join(proof.notes), str(proof)


@pytest.mark.slow
def test_several_ranks_of_a_reference_read_the_batch_together(proved: Callable) -> None:
    """Four ranks with 8 rows each, against two, whose batch becomes 16 rows, not 32."""
    text = SCALED.replace("torch.manual_seed(0)\n", "assert world > 1\ntorch.manual_seed(0)\n")
    proof = proved(text, "--batch-size", "8", ranks=4, against=2)
    assert proof.verdict == "holds", str(proof)
    assert proof.line.startswith("proof: 4 ranks equal 2 ranks in")
    assert "multiplied by 2" in "".join(proof.notes), str(proof)


@pytest.mark.slow
def test_one_step_of_a_gan_on_the_function_data_parallel(
    in_forks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference uses one GPU, and both runs reach the second optimizer's step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gan.py").write_text(GAN)
    proof = prove.run("python gan.py", gpus=2, timeout=60)
    assert proof.verdict == "fails" and proof.cause.kind == "batch_norm", str(proof)


@pytest.mark.long
@pytest.mark.slow
def test_a_given_reference_with_a_smaller_batch(
    in_forks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fabric.py").symlink_to(right_cases.FOLDER / "fabric.py")
    start = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node="
    proof = prove.run(f"{start}2 fabric.py", reference=f"{start}1 fabric.py", timeout=60)
    assert proof.verdict == "holds", str(proof)
    assert "equal the reference, whose batch is 2 times its own, in" in proof.line


def test_numpy_is_seen_to_draw_a_whole_block() -> None:
    """After 312 numbers its generator is at the place where it began."""

    class Rows:
        def __getitem__(self, number: int) -> np.ndarray:
            return np.random.rand(312)

    before = np.random.get_state()
    first, drew = randomness._row(Rows(), 7)
    assert drew and np.array_equal(first, randomness._row(Rows(), 7)[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


@pytest.mark.slow
def test_losses_of_replicas_that_are_added_are_named(
    in_forks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (right_cases.FOLDER / "data_parallel.py").read_text()
    for old, new in (
        ("nn.DataParallel(model.to", "nn.DataParallel(WithLoss(model).to"),
        ("F.cross_entropy(model(x), y)", "model(x, y).sum()"),
        ("torch.manual_seed(0)\n", f"{WITH_LOSS}\n\ntorch.manual_seed(0)\n"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "added.py").write_text(text)
    proof = prove.run("python added.py", gpus=2, steps=2, timeout=60)
    assert proof.cause and proof.cause.kind == "replicas_added", str(proof)
