"""DDP's buckets: which gradients one all-reduce carries, in the order in which it starts them.

DDP takes the gradients in the order in which the first backward pass gave them, and closes a
bucket when it holds 1 MiB (the first bucket) or 25 MiB (all others) or more. A gradient is
never divided. Source: torch/csrc/distributed/c10d/reducer.cpp, functions rebuild_buckets and
compute_bucket_assignment_by_size; the sizes are DDP's defaults (kDefaultFirstBucketBytes,
bucket_cap_mb). A first bucket of 1 MiB lets the first all-reduce start early.
"""

from collections.abc import Iterable

FIRST = 2**20
OTHERS = 25 * 2**20


def buckets(sizes: Iterable[int], first: int = FIRST, others: int = OTHERS) -> list[list[int]]:
    """The numbers of the gradients in each bucket.

    `sizes` are the gradients' bytes, in the order in which backward gives them. All gradients
    have the same dtype; DDP makes buckets of their own for each dtype.
    """
    full: list[list[int]] = []
    bucket: list[int] = []
    held = 0
    for number, size in enumerate(sizes):
        bucket.append(number)
        held += size
        if held >= (others if full else first):
            full.append(bucket)
            bucket = []
            held = 0
    return [*full, bucket] if bucket else full
