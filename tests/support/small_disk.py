"""A disk that is full, for this process."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_disk(size: int = 500) -> Iterator[None]:
    """No file can become larger than `size` bytes: the kernel fails the write, as if full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
