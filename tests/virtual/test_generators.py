"""Random numbers of a virtual GPU: the device's default generator, and torch.Generator."""

import copy
import pickle

import pytest
import torch
from torch import nn

from multigpu.virtual import control
from multigpu.virtual.ops.generator import REMEMBERED
from multigpu.virtual.sim import machine


def draw(device: torch.device | str, generator: torch.Generator) -> list[list[float]]:
    """Random numbers of four operations, which take the generator in different ways."""
    options = {"generator": generator}
    return [
        torch.rand(2, device=device, **options).tolist(),
        nn.init.normal_(torch.empty(2, device=device), **options).tolist(),
        torch.poisson(torch.ones(2, device=device), **options).tolist(),
        torch.multinomial(torch.ones(9, device=device), 2, **options).tolist(),
    ]


def test_a_generator_of_a_device(two):
    torch.manual_seed(0)
    before = torch.vgpu.get_rng_state(1)
    for name, place in (("vgpu:1", two[1]), ("vgpu", two[0])):
        generator = torch.Generator(device=name).manual_seed(3)
        on_cpu = torch.Generator().manual_seed(3)
        assert isinstance(generator, torch.Generator)
        assert isinstance(on_cpu, torch.Generator)
        assert generator.device == place
        assert draw(place, generator) == draw("cpu", on_cpu)
    unchanged = torch.equal(before, torch.vgpu.get_rng_state(1))
    assert unchanged, "the device's default generator is a separate one"
    words = "Expected a 'vgpu:1' generator device but found 'vgpu:0'"
    with pytest.raises(RuntimeError, match=words):
        torch.rand(2, device=two[1], generator=generator)
    control.stop()
    assert isinstance(torch.Generator, type)
    assert type(torch.Generator()) is torch.Generator


def test_a_subclass_of_generator(two):
    class Subclass(torch.Generator):
        pass

    assert type(Subclass()) is Subclass


def test_a_generators_copies_stay_on_its_device(two):
    generator = torch.Generator(device=two[1]).manual_seed(3)
    copies = [
        copy.deepcopy(generator),
        pickle.loads(pickle.dumps(generator)),
        generator.clone_state(),
    ]
    expected = torch.randn(2, device=two[1], generator=generator)
    for duplicate in copies:
        assert duplicate.device == two[1]
        assert torch.equal(torch.randn(2, device=two[1], generator=duplicate), expected)


def test_a_state_has_16_bytes_as_on_cuda(two):
    torch.manual_seed(7)
    state = torch.vgpu.get_rng_state()
    assert state.view(torch.int64).tolist() == [7, 0]
    expected = torch.rand(3, device=two[0])
    seed, offset = torch.vgpu.get_rng_state().view(torch.int64).tolist()
    assert seed == 7
    assert offset > 0
    assert offset % 4 == 0
    torch.vgpu.set_rng_state(torch.tensor([7, 0]).view(torch.uint8))
    assert torch.equal(torch.rand(3, device=two[0]), expected)
    for wrong in (torch.get_rng_state(), torch.zeros(2)):
        with pytest.raises(RuntimeError, match="RNG state is wrong size"):
            torch.vgpu.set_rng_state(wrong)


def test_a_state_continues_where_it_was_read(two, tmp_path):
    """Also from a file, from a copy of its bytes, and with the cached second normal number."""
    torch.manual_seed(7)
    torch.randn(3, device=two[1])
    state = torch.vgpu.get_rng_state(1)
    assert torch.equal(state, torch.vgpu.get_rng_state(1)), "reading changes nothing"
    torch.save({"states": torch.vgpu.get_rng_state_all()}, tmp_path / "states.pt")
    expected = torch.randn(5, device=two[1])
    loaded = torch.load(tmp_path / "states.pt")["states"][1]
    for saved in (state, state.clone(), pickle.loads(pickle.dumps(state)), loaded):
        torch.manual_seed(8)
        torch.vgpu.set_rng_state(saved, 1)
        assert torch.equal(torch.randn(5, device=two[1]), expected)
    # Another process remembers no states.
    for _ in range(2 * REMEMBERED):
        torch.rand(1, device=two[0])
        torch.vgpu.get_rng_state()
    torch.vgpu.set_rng_state(torch.load(tmp_path / "states.pt")["states"][1], 1)
    assert torch.equal(torch.randn(5, device=two[1]), expected)
    torch.vgpu.set_rng_state_all([state, state])
    assert torch.equal(torch.randn(5, device=two[0]).cpu(), expected.cpu())


def test_each_offset_gives_numbers_of_its_own(two):
    """DTensor adds to a state's offset: all ranks get the same numbers for the same offset."""
    torch.manual_seed(7)
    torch.rand(3, device=two[0])

    def draw_at(more: int, index: int) -> list[float]:
        shifted = state.clone()
        shifted[8:] = (state[8:].view(torch.int64) + more).view(torch.uint8)
        torch.vgpu.set_rng_state(shifted, index)
        return torch.rand(3, device=two[index]).tolist()

    state = torch.vgpu.get_rng_state()
    drawn = [draw_at(more, index=0) for more in (0, 4, 8)]
    assert len({tuple(numbers) for numbers in drawn}) == 3
    assert drawn == [draw_at(more, index=1) for more in (0, 4, 8)]
    changed = torch.vgpu.get_rng_state()
    changed[8:] = state[8:]
    changed[:8] = state[:8]
    torch.vgpu.set_rng_state(changed)
    assert torch.rand(3, device=two[0]).tolist() == drawn[0], "the bytes count"


def test_the_default_generators(two):
    generator = machine.current().generators[1]
    assert generator.device == two[1]
    generator.manual_seed(3)
    expected = torch.rand(3, device=two[1])
    generator.manual_seed(3)
    assert torch.equal(torch.rand(3, device=two[1], generator=generator), expected)
    assert torch.equal(
        torch.empty(3, device=two[1]).uniform_(generator=generator).sign(), expected.sign()
    )
