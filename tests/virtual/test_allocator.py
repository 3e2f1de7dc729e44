"""The caching allocator: CUDA's rules for segments and chunks, each with small numbers."""

import itertools
import random

import pytest

from multigpu.virtual.sim import alloc_conf
from multigpu.virtual.sim.alloc_conf import Settings
from multigpu.virtual.sim.allocator import Allocator
from multigpu.virtual.sim.pools import FREE, UNMAPPED

MIB = 2**20


@pytest.fixture
def make(monkeypatch):
    """A function that makes an allocator of a GPU with so many bytes, and these settings."""

    def make(nbytes: int, settings: str = "") -> Allocator:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
        allocator = Allocator(
            lambda wanted: reserved(allocator) + wanted <= nbytes, 2**40, 2 * nbytes
        )
        return allocator

    return make


def reserved(allocator: Allocator) -> int:
    return allocator.reserved["all"].current


def test_the_smallest_chunk_that_fits_is_used_and_its_rest_is_split_off(make):
    allocator = make(200 * MIB)
    large, small = allocator.malloc(40 * MIB, 0), allocator.malloc(16 * MIB, 0)
    between = allocator.malloc(30 * MIB, 0)
    first, second = large.address, small.address
    for chunk in (large, small, between):
        allocator.free(chunk)
    assert allocator.malloc(12 * MIB, 0).address == second
    assert allocator.inactive() == (1, 4 * MIB)
    # A rest of 1 MiB or less stays with the chunk.
    whole = allocator.malloc(39 * MIB, 0)
    assert (whole.address, whole.size) == (first, 40 * MIB)
    assert reserved(allocator) == 86 * MIB


def test_max_split_size(make):
    allocator = make(300 * MIB, "max_split_size_mb:100")
    large = allocator.malloc(140 * MIB, 0)
    allocator.free(large)
    allocator.malloc(50 * MIB, 0)
    assert reserved(allocator) == 190 * MIB, "140 MiB are not split for a smaller request"
    again = allocator.malloc(121 * MIB, 0)
    assert (again.address, again.size) == (large.address, 140 * MIB)
    allocator.free(again)
    # 20 MiB more than the request are too many, so the chunk is given back, and no other.
    allocator.malloc(118 * MIB, 0)
    assert reserved(allocator) == 168 * MIB and allocator.num_retries == 0


def test_expandable_segments_give_whole_pages_back(make):
    allocator = make(100 * MIB, "expandable_segments:True")
    first, second = allocator.malloc(30 * MIB, 0), allocator.malloc(5 * MIB, 0)
    assert reserved(allocator) == 40 * MIB
    allocator.free(first)
    allocator.release()
    # Its second page has a part of `second`.
    assert reserved(allocator) == 20 * MIB
    assert [[chunk.size for chunk in chunks] for chunks in allocator.ranges()] == [
        [10 * MIB, 5 * MIB, 5 * MIB]
    ]
    assert allocator.malloc(30 * MIB, 0).address == first.address
    allocator.free(second)
    assert allocator.malloc(10 * MIB, 0).address == second.address


def test_the_newer_name_of_the_settings_comes_first(monkeypatch):
    monkeypatch.setenv(
        "PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:[256:1,>:2], max_split_size_mb:64"
    )
    assert Settings.parse(alloc_conf.settings_text()).max_split == 64 * MIB
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert Settings.parse(alloc_conf.settings_text()) == Settings(expandable=True)
    with pytest.raises(ValueError, match=r"'max_split_size_mb:1\.5', which is no value"):
        Settings.parse("max_split_size_mb:1.5")


@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "max_split_size_mb:64"])
def test_chunks_stay_consistent(make, settings):
    draw = random.Random(0)
    allocator = make(600 * MIB, settings)
    used: list = []
    for step in range(4000):
        if used and draw.random() < 0.5:
            allocator.free(used.pop(draw.randrange(len(used))))
        else:
            size = 512 * draw.choice([1, 3, 700, 2048, 5000, 30_000, 150_000])
            chunk = allocator.malloc(size, draw.choice([0, 0, 0, 1]))
            if chunk is not None:
                assert chunk.size >= size
                used.append(chunk)
        if step % 500 == 250:
            allocator.release()
        if step % 50 == 0:
            check(allocator, used)
    assert allocator.num_retries, "the memory was never full"


def check(allocator: Allocator, used: list) -> None:
    ranges = list(allocator.ranges())
    every = [chunk for chunks in ranges for chunk in chunks]
    assert sum(chunk.size for chunk in every) == reserved(allocator) <= 600 * MIB
    free = {chunk for chunk in every if chunk.state == FREE}
    assert {*every} - free == {*used}
    for chunks in ranges:
        for one, following in itertools.pairwise(chunks):
            assert one.address + one.size == following.address and following.previous is one
            assert not {one, following} <= free, "free neighbours"
    pools = allocator.pools.values()
    assert {chunk for pool in pools for _, _, chunk in pool.free} == free
    for pool in pools:
        assert pool.free == sorted(pool.free, key=lambda entry: entry[:2])
        assert all(
            (chunk.size, chunk.address) == (size, place) for size, place, chunk in pool.free
        )
        assert all(chunk.state == UNMAPPED for _, chunk in pool.unmapped)
