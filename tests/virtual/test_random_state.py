"""The random state of virtual GPUs that look like CUDA: 16 bytes, and the CPU's numbers."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint


def draw(device: str = "cuda") -> list[float]:
    return torch.rand(3, device=device).tolist()


def test_the_numbers_are_the_cpus(cuda):
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    assert draw("cuda:0") == draw("cuda:1") == expected
    torch.cuda.manual_seed(5)
    assert draw("cuda:0") == expected != draw("cuda:1")
    torch.cuda.manual_seed_all(5)
    assert draw("cuda:0") == draw("cuda:1") == expected
    assert torch.cuda.initial_seed() == 5
    torch.cuda.seed_all()
    assert torch.cuda.initial_seed() != 5


def test_a_state_has_16_bytes_and_brings_the_numbers_back(cuda):
    torch.cuda.manual_seed(1)
    draw()
    state = torch.cuda.get_rng_state()
    assert state.shape == (16,) and state.dtype == torch.uint8 and state.device.type == "cpu"
    assert state[:8].view(torch.int64).item() == 1
    again = torch.cuda.get_rng_state()
    assert torch.equal(state, again)  # reading a state draws nothing
    first = draw()
    assert not torch.equal(state, torch.cuda.get_rng_state())
    for copy in (state, again, state.clone()):
        torch.cuda.set_rng_state(copy)
        assert draw() == first


def test_a_state_that_a_program_makes(cuda):
    def numbers(seed: int, offset: int) -> list[float]:
        words = torch.tensor([seed, offset], dtype=torch.int64)
        torch.cuda.set_rng_state(words.view(torch.uint8))
        return draw()

    torch.cuda.manual_seed(7)
    assert draw() == numbers(7, 0) != numbers(7, 44) == numbers(7, 44)
    assert numbers(2**62, 4) != numbers(2**62, 8)
    with pytest.raises(RuntimeError, match="wrong size"):
        torch.cuda.set_rng_state(torch.zeros(5, dtype=torch.uint8))


def test_generators(cuda):
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert generator.device == torch.device("cuda:0")
    first = torch.rand(2, device="cuda", generator=generator)
    assert torch.equal(first, torch.rand(2, device="cuda", generator=generator.manual_seed(3)))
    assert torch.Generator("cuda:1").device == torch.device("cuda:1")
    default = torch.cuda.default_generators[1]
    default.manual_seed(3)
    assert torch.equal(first.cpu(), torch.rand(2, device="cuda:1").cpu())
    default.manual_seed(3)
    assert torch.equal(first.cpu(), torch.rand(2, device="cuda:1", generator=default).cpu())
    clone = default.clone_state()
    assert torch.rand(1, device="cuda:1").item() == (
        torch.rand(1, device="cuda:1", generator=clone).item()
    )


def test_the_random_state_around_a_block(cuda):
    torch.manual_seed(0)
    with torch.random.fork_rng():
        draw()
    assert draw() == [*torch.rand(3, generator=torch.Generator().manual_seed(0)).tolist()]


def test_dropout_in_a_checkpoint_is_that_of_the_first_pass(cuda):
    layer = torch.nn.Dropout(0.5)
    for reentrant in (False, True):
        leaf = torch.ones(64, device="cuda", requires_grad=True)
        out = checkpoint(layer, leaf, use_reentrant=reentrant)
        out.sum().backward()
        assert torch.equal(leaf.grad, out.detach())
