"""make test-outside runs a script on virtual GPUs and on the CPU, and compares the losses."""

import importlib
import sys

import pytest
import torch
from commands import ROOT

OUTSIDE = ROOT / "tests" / "outside"
SCRIPT = """
import torch

torch.manual_seed(0)
assert torch.cuda.device_count() == 2
layer = torch.nn.Linear(4, 1).cuda()
parallel = torch.nn.DataParallel(torch.nn.Sequential(layer, torch.nn.BatchNorm1d(1)).cuda())
for step in range(3):
    x = torch.randn(6, 4, device="cuda") + torch.randn(6, 4).to("cuda:0")
    loss = torch.nn.functional.dropout(parallel(x)).square().mean()
    loss.backward()
    print(f"loss {loss.item():.4f}")
"""


@pytest.fixture
def outside(monkeypatch):
    """Import a module of tests/outside by its name."""
    monkeypatch.syspath_prepend(OUTSIDE)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(OUTSIDE) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


@pytest.fixture
def row(outside, tmp_path):
    """Run SCRIPT, with `change` of its text, as a case; return its row."""
    case = outside("case")
    runner = outside("run")

    def make(change=("", ""), **settings):
        checkout = tmp_path / "checkouts" / "one"
        checkout.mkdir(parents=True)
        (checkout / "train.py").write_text(SCRIPT.replace(*change))
        (checkout / "COMMIT").write_text("owner/name 0123abc\n")
        settings = {"losses": rf"loss {case.NUMBER}"} | settings
        one = case.Case("one", "one", ".", "train.py", **settings)
        places = (checkout, tmp_path / "packages", tmp_path / "data", tmp_path / "working")
        return runner.Run(one, *places).row()

    return make


@pytest.mark.slow
def test_the_losses_of_both_runs_are_compared(row):
    found = row()
    assert (found["result"], found["repository"], found["commit"]) == (
        "ran",
        "owner/name",
        "0123abc",
    )
    assert found["losses"] == {
        "reference": "CPU",
        "compared": 3,
        "equal": True,
        "difference": 0.0,
        "rounded": 0,
    }
    assert found["simulated_seconds"] > 0


@pytest.mark.slow
def test_a_loss_that_differs_on_virtual_gpus_is_found(row):
    found = row(("{loss.item():", "{loss.item() + 0.001 * x.is_cuda:"))
    assert found["losses"]["compared"] == 3
    assert not found["losses"]["equal"]
    assert found["losses"]["difference"] == pytest.approx(0.001)


# Its gradient is 0: the layer keeps its weights, and SGD's decay alone changes them.
NO_GRADIENT = """    loss = 0 * parallel(x).mean()
    loss.backward()
    torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.1).step()"""
WITH_GRADIENT = NO_GRADIENT.replace("0 * ", "")


@pytest.mark.slow
@pytest.mark.parametrize("training", [NO_GRADIENT, WITH_GRADIENT])
def test_equal_losses_without_a_gradient_are_no_proof(row, training):
    line = "    loss = torch.nn.functional.dropout(parallel(x)).square().mean()\n"
    found = row((f"{line}    loss.backward()", training), losses=r"loss (\S+)")["losses"]
    if training == NO_GRADIENT:
        assert found.startswith("unproven: its optimizer moves no weight")
    else:
        assert found["compared"] == 3 and found["equal"]


@pytest.mark.slow
def test_a_script_that_did_not_use_its_gpus_has_failed(row):
    found = row(("import torch\n", "raise SystemExit\n"))
    assert found["result"] == "failed: it used no virtual GPU"
    assert "losses" not in found


def test_why_a_script_stands_still_comes_before_what_follows_from_it(outside):
    last_line = outside("run")._last_line
    error = "[rank1]: ValueError: too few\nmore"
    assert last_line(error) == "ValueError: too few"
    assert last_line(f"  likely: a message is missing.\n{error}").endswith("is missing.")


def test_the_scalars_of_a_tensorboard_file_are_its_losses(outside, tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for step, loss in enumerate((0.5, 2.0, 0.1)):
            writer.add_scalar("loss", loss, step)
    assert outside("compare").scalars(next(tmp_path.iterdir())) == [
        str(float(torch.tensor(loss))) for loss in (0.1, 0.5, 2.0)
    ]


@pytest.mark.parametrize(
    ("line", "translated"),
    [
        ('model.to("cuda:1")', 'model.to("cpu")'),
        ("x.cuda(non_blocking=True) + y.cuda()", "x + y"),
        ("init_process_group('nccl')", "init_process_group('gloo')"),
        ("n = torch.cuda.device_count()", "n = 2"),
        ("DDP(model, device_ids=[rank])", "DDP(model, device_ids=None)"),
        ('f"cuda:{rank}"', 'f"cpu"'),
        ('"a cuda kernel"', '"a cuda kernel"'),
    ],
)
def test_words_of_cuda_become_the_cpus(outside, tmp_path, line, translated):
    path = tmp_path / "train.py"
    path.write_text(line)
    outside("translate").translate(tmp_path, "CPU", 2, {})
    assert path.read_text() == translated


def test_ranks_may_print_in_any_order_but_not_nothing(outside):
    compare = outside("compare")
    one = compare.losses("loss 2.50\nloss 1.25e-01", r"loss (\d\S+)")
    other = compare.losses("loss 1.25e-01\nloss 2.51", r"loss (\d\S+)")
    assert compare.compare_losses(one, one).equal
    found = compare.compare_losses(one, other)
    assert (found.compared, found.equal) == (2, False)
    assert found.difference == pytest.approx(0.01)
    # One of five may be rounded to another last digit; two may not, nor two units.
    five = ["1.00"] * 4
    for more, equal, rounded in ((["2.51"], True, 1), (["2.52"], False, 0)):
        found = compare.compare_losses([*five, "2.50"], [*five, *more])
        assert (found.equal, found.rounded) == (equal, rounded)
    assert not compare.compare_losses([*five, "2.50"], [*five[1:], "1.01", "2.51"]).equal
    for first, second in (([], []), (one, one[:1])):
        with pytest.raises(ValueError, match="on the CPU"):
            compare.compare_losses(first, second)


def test_checkpoints_are_compared_by_name(outside, tmp_path):
    compare = outside("compare")
    weights = {"model": {"weight": torch.ones(3), "bias": torch.zeros(1)}, "epoch": 3}
    torch.save(weights, tmp_path / "one.pt")
    weights["model"]["weight"][1] += 1e-3
    torch.save(weights, tmp_path / "other.pt")
    weights["model"]["weight"][1] = torch.nan
    torch.save(weights, tmp_path / "nan.pt")
    del weights["model"]["bias"]
    torch.save(weights, tmp_path / "fewer.pt")
    one = tmp_path / "one.pt"
    assert compare.compare_weights(one, one).equal
    found = compare.compare_weights(one, tmp_path / "other.pt")
    assert (found.compared, found.equal) == (2, False)
    with pytest.raises(ValueError, match="not finite"):
        compare.compare_weights(tmp_path / "nan.pt", tmp_path / "nan.pt")
    with pytest.raises(ValueError, match="holds 2 tensors, on the CPU 1"):
        compare.compare_weights(one, tmp_path / "fewer.pt")
