"""What makes virtual GPUs look like CUDA is in one table, and is put back afterwards."""

import json
from pkgutil import resolve_name

import pytest
import torch
from commands import SUPPORT, run_script
from torch_symbols import full_name, symbol_name

import multigpu
from multigpu.errors import UserError
from multigpu.virtual import control, face
from multigpu.virtual.face import kernels
from multigpu.virtual.options import Options
from multigpu.virtual.patches import TABLE as VGPU_TABLE
from multigpu.virtual.patches.backend import PERMANENT
from multigpu.virtual.patches.replacing import Replacement, Setting


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
    rows = [*VGPU_TABLE.rows, *face.TABLE.rows]
    listed = set()
    for row in rows:
        if isinstance(row, Replacement):
            listed.add(symbol_name(f"{row.owner}.{row.name}") if _exists(row) else "")
            listed.add(f"{row.owner}.{row.name}")
        elif not isinstance(row, Setting):
            for name in row.registries:
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


def test_no_symbol_is_replaced_twice():
    for table in (VGPU_TABLE, face.TABLE):
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
