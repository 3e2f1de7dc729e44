"""Compares torch's modules, classes and registries at two times: which symbols differ?"""

import io
import sys
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

# An owner's name and identity, and the name of an attribute.
Symbol = tuple[str, int, str]

# multiprocessing has a registry to which torch adds entries.
PACKAGES = ("torch", "multiprocessing")

# Changed by torch itself when it is used.
USED = {
    "torch.distributed.distributed_c10d._backend",  # the last process group's backend
    "torch.jit._builtins._builtin_table members",  # the operations that were looked up so far
    "torch.utils.hooks.RemovableHandle.next_id",  # a counter
}


def snapshot() -> dict[Symbol, Any]:
    """The attributes of torch's modules and classes, and the members of lists, dicts and sets.

    The values themselves are kept, so that no identity is used twice.
    """
    symbols: dict[Symbol, Any] = {}
    classes: dict[int, type] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in PACKAGES or not isinstance(module, ModuleType):
            continue
        symbols["sys.modules", 0, name] = module
        if module.__name__ != name:  # torch.vgpu, which is a module of ours
            continue
        for attribute, value in list(vars(module).items()):
            symbols[name, id(module), attribute] = value
            if issubclass(type(value), type) and value.__module__.startswith(PACKAGES):
                classes[id(value)] = value
    for identity, cls in classes.items():
        for attribute, value in list(vars(cls).items()):
            symbols[full_name(cls), identity, attribute] = value
    # A list that several modules import has the name of the first.
    seen: set[int] = set()
    for (owner, identity, attribute), value in list(symbols.items()):
        if type(value) in (list, dict, set) and id(value) not in seen:
            seen.add(id(value))
            members = [*value, *value.values()] if type(value) is dict else [*value]
            symbols[owner, identity, f"{attribute} members"] = members
    return symbols


def full_name(owner: type | ModuleType | object) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    # An operation such as flex_attention is an object of a module.
    name = owner.__qualname__ if isinstance(owner, type) else owner.__name__
    return f"{owner.__module__}.{name}"


def symbol_name(name: str) -> str:
    """The name in `differences` of "torch.nn.Module.vgpu" and the like."""
    owner, _, attribute = name.rpartition(".")
    return f"{full_name(resolve_name(owner))}.{attribute}"


def differences(before: dict[Symbol, Any], after: dict[Symbol, Any]) -> list[str]:
    """The names of the symbols that are new, gone, or other objects than before.

    A module that torch has imported in the meantime is no difference.
    """
    owners = {identity for _, identity, _ in before}
    names = set()
    for symbol in before.keys() | after.keys():
        owner, identity, attribute = symbol
        new = symbol not in before
        if new and (identity not in owners or _is_import(owner, attribute, after[symbol])):
            continue
        if new or symbol not in after or not _same(before[symbol], after[symbol], attribute):
            names.add(f"{owner}.{attribute}")
    # The members of a list that is another list are no difference of their own.
    names -= {f"{name} members" for name in names}
    return sorted(names - USED)


def _is_import(owner: str, attribute: str, value: Any) -> bool:
    name = attribute if owner == "sys.modules" else f"{owner}.{attribute}"
    return isinstance(value, ModuleType) and value.__name__ == name


def _same(before: Any, after: Any, attribute: str) -> bool:
    if not attribute.endswith(" members"):
        return before is after
    return len(before) == len(after) and all(map(lambda x, y: x is y, before, after))


def train(devices: list, backend: str) -> None:
    """Use what is replaced: DataParallel, DDP, pinned memory, generators and files."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    first = devices[0]
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(first)
    indices = [device.index for device in devices if device.type != "cpu"]
    parallel = nn.DataParallel(model, indices)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    optimizer = torch.optim.AdamW(model.parameters())
    for wrapped in (parallel, DistributedDataParallel(model)):
        for rows in DataLoader(torch.ones(8, 4), 4, pin_memory=first.type != "cpu"):
            with torch.autocast(first.type, torch.bfloat16):
                loss = wrapped(rows.to(first, non_blocking=True)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
    torch.rand(2, device=first, generator=torch.Generator(device=first))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    torch.load(file)
