"""`multigpu scaling` as a process of its own: what it does not import, and its numbers."""

import json
import sys

import pytest
from commands import ROOT, run

from multigpu.cli import stand_ins
from multigpu.scaling import predict, report

REPLACED = ("torch._dynamo", "torch.distributed.tensor")
CLUSTER = {"gpu": "H100-80GB", "link": "NVLink4", "between_nodes": "NDR400"}


def python(code: str, *flags: object) -> str:
    """What the code prints in a process that begins without torch."""
    done = run(sys.executable, "-c", code, *flags, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet50", "vgg16", "gpt:24x2304x24"])
def test_the_command_does_without_the_modules_and_gives_the_same_numbers(model, tmp_path):
    file = tmp_path / "numbers.json"
    code = f"""
import sys
from multigpu.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end
print("imported:", [name for name in {REPLACED} if name in sys.modules])
"""
    flags = [("--" + name.replace("_", "-"), value) for name, value in CLUSTER.items()]
    flags = [part for flag in flags for part in flag]
    said = python(code, "scaling", "--model", model, *flags, "--json", file)
    assert said.endswith("imported: []\n")
    # This process has torch's own modules.
    expected = report.as_json(predict(model, **CLUSTER))
    assert json.loads(file.read_text()) == json.loads(json.dumps(expected))


def test_a_process_that_has_torch_gets_no_stand_in():
    before = {name: sys.modules.get(name) for name in REPLACED}
    with stand_ins.installed():
        assert {name: sys.modules.get(name) for name in REPLACED} == before


@pytest.mark.slow
def test_other_names_come_from_the_real_modules():
    code = f"""
import sys
from multigpu.cli import stand_ins
with stand_ins.installed():
    import torch
    for name in {REPLACED}:
        assert type(sys.modules[name]) is stand_ins.StandIn, name
    assert not hasattr(torch._dynamo, "__file__")
    assert type(torch._dynamo) is stand_ins.StandIn
    assert torch._dynamo.list_backends()
    assert torch._dynamo is sys.modules["torch._dynamo"]
    assert type(torch._dynamo) is not stand_ins.StandIn
    import torch.distributed.tensor.parallel
    assert torch.distributed.tensor.Shard(0).dim == 0
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).sum() == 4
print("done")
"""
    assert python(code).endswith("done\n")


@pytest.mark.slow
def test_the_stand_ins_leave_with_the_block():
    code = f"""
import sys
from multigpu.cli import stand_ins
try:
    with stand_ins.installed():
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
import torch
assert not any(name in sys.modules for name in {REPLACED})
assert "_dynamo" not in vars(torch) and "tensor" not in vars(torch.distributed)
from torch.distributed.tensor import DTensor
assert DTensor is not stand_ins.NoDTensor
print("done")
"""
    assert python(code).endswith("done\n")
