"""The random state of virtual GPUs that look like CUDA: 16 bytes, and the CPU's numbers."""

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


def test_generators(cuda):
    """tests/vgpu/test_generators.py has more: under both names they are the same."""
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert generator.device == torch.device("cuda:0")
    first = torch.rand(2, device="cuda", generator=generator)
    default = torch.cuda.default_generators[1]
    default.manual_seed(3)
    assert torch.equal(first.cpu(), torch.rand(2, device="cuda:1").cpu())
    state = torch.cuda.get_rng_state()
    assert state.shape == (16,) and state.dtype == torch.uint8 and state.device.type == "cpu"
