"""What virtual GPUs replace in torch is in one table, and is put back when they stop.

tests/virtual/test_face_table.py compares all symbols of torch.
"""

from pkgutil import resolve_name
from typing import Any

import pytest
import torch

# Then each row has an effect.
import torch._dynamo
import torch.distributed as dist
from torch import nn

from multigpu.virtual import control
from multigpu.virtual.patches import TABLE
from multigpu.virtual.patches.replacing import Registration, Replacement, Table

ROWS = [row for row in TABLE.rows if row.when()]


def state() -> list[Any]:
    """For each row what torch has now: the owner's attribute, or the registries' entries."""
    return [_attribute(row) if isinstance(row, Replacement) else _entries(row) for row in ROWS]


def _attribute(row: Replacement) -> Any:
    return vars(resolve_name(row.owner)).get(row.name, "inherited")


def _entries(row: Registration) -> list[list]:
    registries = [resolve_name(name) for name in row.registries]
    return [list(vars(each) if isinstance(each, type) else each) for each in registries]


def same(before: list[Any], after: list[Any]) -> list[bool]:
    """For each row: whether torch has what it had before."""
    return [
        old is new or (isinstance(row, Registration) and old == new)
        for row, old, new in zip(ROWS, before, after, strict=True)
    ]


def test_every_row_is_in_place_while_virtual_gpus_run():
    before = state()
    with control.running(count=2):
        assert not any(same(before, state()))
    assert all(same(before, state()))


def fail(*args: object) -> None:
    raise ArithmeticError("this row fails")


@pytest.mark.parametrize("place", [0, len(TABLE.rows)])
@pytest.mark.parametrize(
    "row",
    [
        Replacement("torch.nn.Module", "to", fail, "cannot be made"),
        Replacement("torch.nn.Module", "nowhere", fail, "has no original"),
        Registration(("torch.nn.modules.__all__",), fail, "cannot be registered"),
        Registration(("torch.nn.nowhere",), print, "has no registry"),
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


def test_a_registration_that_fails_leaves_no_entry(monkeypatch):
    registry = [1]
    monkeypatch.setattr(nn, "registry", registry, raising=False)

    def register() -> None:
        registry.append(2)
        fail()

    with pytest.raises(ArithmeticError):
        Table((Registration(("torch.nn.registry",), register, "fails half-way"),)).apply()
    assert registry == [1]


def test_what_a_program_adds_stays_and_what_it_has_removed_is_no_error(monkeypatch):
    registry, mapping = [1], {"a": 1}
    monkeypatch.setattr(nn, "registry", registry, raising=False)
    monkeypatch.setattr(nn, "mapping", mapping, raising=False)

    def register() -> None:
        registry.append(2)
        mapping["b"] = 2

    both = ("torch.nn.registry", "torch.nn.mapping")
    table = Table(
        (
            Replacement("torch.nn.Linear", "to", lambda original: fail, "inherited"),
            Registration(both, register, "adds two entries"),
        )
    )
    table.apply()
    registry.append(3)
    mapping["c"] = 3
    registry.remove(2)
    del nn.Linear.to
    table.undo()
    assert registry == [1, 3] and mapping == {"a": 1, "c": 3}
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
