"""What a process says of its program: DDP's hooks, groups of ranks, random modules, GPUs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from multigpu.prove.inside.parts import clean


def made(loss: torch.Tensor) -> list[str]:
    """The last operations that made a loss, the last one first."""
    names, node = [], loss.grad_fn
    while node is not None and len(names) < 8:
        reduction = {1: " mean", 2: " sum"}.get(getattr(node, "_saved_reduction", None), "")
        names.append(node.name() + reduction)
        node = node.next_functions[0][0] if node.next_functions else None
    return names


def hooks_of(ddp: DDP) -> list[Callable]:
    return [hook for hook, _ in getattr(ddp, "_prove_hooks", [])]


def name_of(hook: Any) -> str:
    return getattr(hook, "__name__", type(hook).__name__)


def coarse(ddps: Any, modules: list[nn.Module]) -> float:
    """The largest eps of the types in which gradients are sent; 0 if nothing sets one."""
    names = {name_of(hook) for ddp in ddps for hook in hooks_of(ddp)}
    types = [
        dtype
        for start, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))
        if any(name.startswith(start) for name in names)
    ]
    for module in modules:
        policy = getattr(module, "mixed_precision", None)
        if hasattr(module, "_get_fsdp_state"):
            policy = getattr(module._get_fsdp_state(), "_mp_policy", None)
        dtype = getattr(policy, "reduce_dtype", None) or getattr(policy, "param_dtype", None)
        types += [dtype] if isinstance(dtype, torch.dtype) else []
    return max((torch.finfo(dtype).eps for dtype in types), default=0.0)


def peers(ddps: Any, modules: list[nn.Module]) -> tuple[int, ...] | None:
    """The ranks that share this rank's data-parallel work: DDP's groups, FSDP's meshes."""
    pairs = [(ddp.process_group, None) for ddp in ddps]
    for module in modules:
        if hasattr(module, "_get_fsdp_state"):
            group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)
            mesh = getattr(group, "mesh_info", None)
            names = "shard_process_group", "replicate_process_group"
            pairs.append(tuple(getattr(mesh, name, None) for name in names))
        elif type(module).__name__ == "FullyShardedDataParallel":
            pairs.append((module.process_group, getattr(module, "_inter_node_pg", None)))
    dist, ranks = torch.distributed, set[int]()
    for pair in pairs:
        row_ranks, column_ranks = (
            dist.get_process_group_ranks(group) if group is not None else [dist.get_rank()]
            for group in pair
        )
        # Hybrid shards: the groups are a row and a column of a mesh of ranks.
        ranks |= {
            row + column - dist.get_rank() for row in row_ranks for column in column_ranks
        }
    return tuple(sorted(ranks)) if pairs else None


def gpus() -> int:
    """The number of GPUs on which this process has had tensors."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    used = map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))
    return sum(nbytes > 0 for nbytes in used)


def random_states() -> list[torch.Tensor]:
    """The states of the generators from which modules draw."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def random_modules(module: nn.Module) -> list[str]:
    names = [
        f"{type(submodule).__name__} {clean(name)}".strip()
        for name, submodule in module.named_modules()
        if submodule.training and _drops(submodule)
    ]
    return names or ["forward"]


def _drops(module: nn.Module) -> bool:
    """Whether a module in training drops something at random."""
    kind = type(module).__name__
    if isinstance(module, nn.RNNBase):
        return module.num_layers > 1 and module.dropout > 0
    share = getattr(module, "p", getattr(module, "drop_prob", 1))
    return ("Drop" in kind or kind == "StochasticDepth") and share != 0
