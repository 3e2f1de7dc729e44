"""The number of ranks, also where torch.distributed has not been started."""

import torch.distributed as dist


def num_ranks() -> int:
    """The number of ranks; 1 if torch.distributed has not been started."""
    return dist.get_world_size() if dist.is_initialized() else 1
