"""Random numbers of a virtual GPU: the device's default generator, and torch.Generator."""

import copy
import pickle

import pytest
import torch
from torch import nn

from multigpu import vgpu


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
    vgpu.stop()
    assert isinstance(torch.Generator, type)
    assert type(torch.Generator()) is torch.Generator


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


def test_subclasses_of_generator(two):
    class Subclass(torch.Generator):
        pass

    assert type(Subclass()) is Subclass
    assert isinstance(Subclass(), torch.Generator)
    assert issubclass(type(torch.default_generator), torch.Generator)
    assert torch.Generator().device.type == "cpu"


def test_each_device_has_random_numbers_of_its_own(two):
    first, second = two
    torch.manual_seed(7)
    expected = torch.randn(5)
    torch.manual_seed(7)
    # Numbers that the host draws do not change those of the devices.
    torch.randn(3)
    assert torch.equal(torch.randn(5, device=first).cpu(), expected)
    assert torch.equal(torch.randn(5, device=second).cpu(), expected)
    state = torch.vgpu.get_rng_state(first)
    drawn = torch.rand(4, device=first).cpu()
    torch.vgpu.set_rng_state(state, first)
    assert torch.equal(torch.rand(4, device=first).cpu(), drawn)
    words = "Expected a 'vgpu' device type for generator but found 'cpu'"
    with pytest.raises(RuntimeError, match=words):
        torch.randn(2, device=first, generator=torch.Generator())
