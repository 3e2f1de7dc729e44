"""The functions of torch.cuda.memory that are more than a number: statistics and a limit."""

from multigpu.virtual.patches.device_index import Device, meter_of


def memory_stats(device: Device = None) -> dict[str, int]:
    """The counters of torch.cuda.memory_stats that a virtual GPU has, for all its memory.

    A virtual GPU keeps no cache of freed memory and does not divide its memory into pools. So
    reserved, active and allocated memory are the same, and the keys of pools are missing.
    """
    meter = meter_of(device)
    so_far = meter.accumulated()
    nbytes = {
        "current": meter.allocated,
        "peak": meter.peak,
        "allocated": so_far["bytes allocated"],
        "freed": so_far["bytes freed"],
    }
    numbers = {
        "current": len(meter.sizes()),
        "allocated": so_far["allocations"],
        "freed": so_far["frees"],
    }
    stats = {"num_alloc_retries": 0, "num_ooms": meter.num_ooms}
    for name in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
        stats |= {f"{name}.all.{key}": value for key, value in nbytes.items()}
    for name in ("allocation", "segment", "active"):
        stats |= {f"{name}.all.{key}": value for key, value in numbers.items()}
    for name in ("inactive_split", "inactive_split_bytes"):
        stats |= {f"{name}.all.{key}": 0 for key in nbytes}
    return dict(sorted(stats.items()))


def memory_snapshot(*arguments: object) -> list[dict[str, int]]:
    """An empty list: a virtual GPU does not cut its memory into segments."""
    return []


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Let this process use only this share of a device's memory, from 0 to 1.

    Raises ValueError for another fraction.
    """
    if not 0 <= fraction <= 1:
        # CUDA's wording.
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    meter = meter_of(device)
    meter.limit = int(meter.capacity * fraction)


def get_per_process_memory_fraction(device: Device = None) -> float:
    """The share of a device's memory that this process may use."""
    meter = meter_of(device)
    return meter.limit / meter.capacity
