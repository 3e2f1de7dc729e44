"""What virtual GPUs replace in torch is in two tables, and is put back when they stop.

One table is for all virtual GPUs, the other one for those that look like CUDA. All symbols of
torch are compared.
"""

import json
import re
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

# Then each row has an effect.
import torch._dynamo
import torch.distributed as dist
from commands import SUPPORT, run_script
from torch import nn
from torch.optim.optimizer import _foreach_supported_types
from torch_symbols import full_name, symbol_name

import multigpu
from multigpu.errors import UserError
from multigpu.virtual import control, face
from multigpu.virtual.face import flex_attention, kernels
from multigpu.virtual.ops.tensor import VirtualTensor
from multigpu.virtual.options import Options
from multigpu.virtual.patches import TABLE
from multigpu.virtual.patches.backend import PERMANENT
from multigpu.virtual.patches.replacing import Replacement, Setting, Table

ROWS = [row for row in TABLE.rows if row.when() and isinstance(row, Replacement)]
# The registries in which settings of both tables have entries.
REGISTRIES = (
    "torch.serialization._package_registry",
    "multiprocessing.reduction.ForkingPickler._extra_reducers",
    "torch.optim.optimizer._foreach_supported_types",
    "torch.distributed.Backend.backend_list",
    "torch.distributed.Backend.default_device_backend_map",
    "torch.distributed.Backend.backend_type_map",
    "torch.distributed.Backend.backend_capability",
    "torch.distributed.Backend._plugins",
    "torch.distributed.Backend",
    f"{flex_attention.MODULE}:flex_attention.py_kernels",
    f"{flex_attention.MODULE}:flex_attention.python_key_table",
)


def state() -> list[Any]:
    """What torch has now: each row's attribute, and the entries of the registries."""
    registries = [resolve_name(name) for name in REGISTRIES]
    return [
        *(vars(resolve_name(row.owner)).get(row.name, "inherited") for row in ROWS),
        *(list(vars(each) if isinstance(each, type) else each) for each in registries),
    ]


def same(before: list[Any], after: list[Any]) -> list[bool]:
    """For each row and registry: whether torch has what it had before."""
    return [
        old is new or (isinstance(old, list) and old == new)
        for old, new in zip(before, after, strict=True)
    ]


def test_every_row_is_in_place_while_virtual_gpus_run():
    before = state()
    with control.running(count=2):
        # The last two registries have entries while virtual GPUs look like CUDA.
        assert not any(same(before, state())[:-2])
    assert all(same(before, state()))


def fail(*args: object) -> None:
    raise ArithmeticError("this row fails")


@pytest.mark.parametrize("place", [0, len(TABLE.rows)])
@pytest.mark.parametrize(
    "row",
    [
        Replacement("torch.nn.Module", "to", fail, "cannot be made"),
        Replacement("torch.nn.Module", "nowhere", fail, "has no original"),
        Setting("a state", fail, "cannot be set"),
    ],
)
def test_a_row_that_fails_leaves_nothing_replaced(monkeypatch, row, place):
    before = state()
    rows = (*TABLE.rows[:place], row, *TABLE.rows[place:])
    monkeypatch.setattr(control, "TABLE", Table(rows))
    # Kept, so that the frames live: what is only collected with them counts as in place.
    with pytest.raises((ArithmeticError, AttributeError)) as error:
        control.start(count=1)
    assert all(same(before, state())) and control.devices() == []
    assert not torch.vgpu.is_available() and error.traceback
    monkeypatch.undo()
    with control.running(count=1) as (device,):
        assert torch.ones(2, device=device).sum().item() == 2


def test_what_a_program_adds_stays_and_what_it_has_removed_is_no_error(monkeypatch):
    types, reducers = _foreach_supported_types, ForkingPickler._extra_reducers
    before = list(types)
    table = Table((Replacement("torch.nn.Linear", "to", lambda original: fail, "inherited"),))
    with control.running(count=1):
        table.apply()
        types.remove(VirtualTensor)
        types.append(nn.Buffer)
        del reducers[VirtualTensor]
        monkeypatch.setitem(reducers, nn.Buffer, fail)
        del nn.Linear.to
        table.undo()
    assert types == [*before, nn.Buffer] and reducers[nn.Buffer] is fail
    types.remove(nn.Buffer)
    assert nn.Linear.to is nn.Module.to


def test_a_process_group_that_outlives_the_virtual_gpus():
    with control.running(count=1) as (device,):
        dist.init_process_group("vgpu", store=dist.HashStore(), rank=0, world_size=1)
        virtual = torch.ones(2, device=device)
        dist.all_reduce(virtual)
    try:
        host = torch.ones(2)
        dist.all_reduce(host)
        dist.barrier()
        assert host.tolist() == [1, 1] and dist.get_backend() == "vgpu"
        with pytest.raises(RuntimeError, match="have been stopped"):
            dist.all_reduce(virtual)
    finally:
        dist.destroy_process_group()


def test_torchs_profiler_works_after_stop():
    """The profiler waits for each registered device type, and vgpu's stays registered."""
    with control.running(1):
        pass
    with torch.profiler.profile() as profile:
        torch.ones(2) + 1
    assert any(event.key == "aten::add" for event in profile.key_averages())


# ---- all symbols of torch ----


@pytest.fixture(scope="module")
def found() -> dict:
    """The symbols of torch that differ in a process of its own: see face_symbols.py."""
    done = run_script(SUPPORT / "face_symbols.py")
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def test_taking_off_puts_back_all_symbols(found):
    assert found["after"] == [] and found["others"] is True


def test_what_the_first_start_leaves_is_listed(found):
    modules = {name for name in PERMANENT if name.startswith("sys.modules")}
    listed = {symbol_name(name) for name in PERMANENT.keys() - modules}
    assert modules == {"sys.modules['torch.vgpu']"}
    left = {name.removesuffix(" members") for name in found["first"]}
    missing = (listed | {"sys.modules.torch.vgpu"}) - left
    # torch 2.11 and 2.12 do not rename the device type in these enums.
    if torch.__version__.startswith(("2.11.", "2.12.")):
        enums = ("torch._C._autograd.DeviceType.", "torch._C._profiler.ProfilerActivity.")
        missing = {name for name in missing if not name.startswith(enums)}
    assert missing == set() and left <= listed | {"sys.modules.torch.vgpu"}


def test_each_replaced_symbol_is_in_a_table(found):
    rows = [*TABLE.rows, *face.TABLE.rows]
    listed = set()
    for row in rows:
        if isinstance(row, Replacement):
            listed.add(symbol_name(f"{row.owner}.{row.name}") if _exists(row) else "")
            listed.add(f"{row.owner}.{row.name}")
    for name in REGISTRIES:
        owner = resolve_name(name)
        listed.add(full_name(owner) if isinstance(owner, type) else symbol_name(name))
    listed.discard("")
    # torch.library keeps the names of the kernels that a CUDA build gets until take_off.
    if kernels.has_cuda_kernels():
        listed.add("torch.library._impls")

    def is_listed(name: str) -> bool:
        name = name.removesuffix(" members")
        return any(name == one or name.startswith(f"{one}.") for one in listed)

    assert [name for name in found["during"] if not is_listed(name)] == []


def _exists(row: Replacement) -> bool:
    return hasattr(resolve_name(row.owner), row.name)


def test_what_torchs_compiler_compares_is_left_alone():
    """The compiler's import looks at the signature of _make_subclass."""
    with multigpu.gpus(2):
        assert torch.Tensor._make_subclass is torch._C.TensorBase._make_subclass


# What torch 2.13 for the CPU does not have, and none of its files declares in torch._C.
MISSING = {
    "torch.nn.parameter.UninitializedTensorMixin.device",  # it is added
    "torch.cuda._get_device_properties",
    "torch.cuda.pynvml",
    "torch.distributed.ProcessGroupNCCL",
    "torch.distributed.distributed_c10d.ProcessGroupNCCL",
    "torch._C._distributed_c10d._dump_nccl_trace",
    "torch._C._distributed_c10d._dump_nccl_trace_json",
}


def test_names_that_a_version_may_lack_occur_in_torch():
    """A name that torch no longer has would be replaced without effect."""
    root = Path(torch.__file__).parent
    files = [*(root / "_C").rglob("*.pyi"), *(root / "cuda").rglob("*.py")]
    declared = set(re.findall(r"\w+", "".join(file.read_text() for file in files)))
    optional = [
        row
        for row in (*TABLE.rows, *face.TABLE.rows)
        if isinstance(row, Replacement) and row.optional
    ]
    missing = {
        f"{row.owner}.{row.name}"
        for row in optional
        if not hasattr(resolve_name(row.owner), row.name)
        and not (row.owner.startswith("torch._C") and row.name in declared)
    }
    assert missing <= MISSING and len(optional) > 100


def test_no_symbol_is_replaced_twice():
    for table in (TABLE, face.TABLE):
        rows = [(row.owner, row.name) for row in table.rows if isinstance(row, Replacement)]
        assert len(rows) == len(set(rows))


def test_options_that_cannot_be_simulated_leave_nothing_replaced():
    before = torch.cuda.is_available
    with pytest.raises(UserError):
        face.put_on(Options(gpu="no such GPU"))
    assert torch.cuda.is_available is before and not face.is_on()
    with control.running(1) as (device,):
        assert device.type == "vgpu"


def test_virtual_gpus_by_two_names_are_refused(two):
    with pytest.raises(UserError, match=r"control\.stop\(\) first"):
        face.put_on()
    assert str(torch.ones(1, device=two[1]).device) == "vgpu:1"


def test_putting_on_twice_is_refused(cuda):
    with pytest.raises(UserError, match="look like CUDA already"):
        face.put_on()
    assert torch.ones(1, device="cuda").is_cuda
