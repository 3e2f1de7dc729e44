"""Point 1: what happens around a model is the CPU's, too: optimizers, clipping, hooks, autocast, random numbers."""

import copy
import inspect

import pytest
import torch
from beside import difference, encoder, images, mlp, sequences, tokens, train
from torch import nn
from torch.nn import functional as F

OPTIMIZERS = [
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(two, name):
    """In its default form, which is foreach on a GPU; and foreach and fused as the CPU has them, to the bit."""
    kind = getattr(torch.optim, name)
    make = (
        (lambda: nn.Sequential(nn.Linear(12, 16, bias=False), nn.Linear(16, 3, bias=False)))
        if name == "Muon"
        else mlp
    )
    assert (
        train(make, sequences(), device=two[1], optimizer=lambda p: kind(p, lr=1e-2))[0]
        <= 1e-6
    )
    for form in {"foreach", "fused"} & set(inspect.signature(kind).parameters):
        assert (
            train(
                make,
                sequences(),
                device=two[1],
                optimizer=lambda p, f=form: kind(p, lr=1e-2, **{f: True}),
            )[0]
            == 0
        )


def test_lbfgs(two):
    torch.manual_seed(0)
    plain = mlp()
    there = copy.deepcopy(plain).to(two[1])
    for model, place in ((plain, "cpu"), (there, two[1])):
        data, update = (
            sequences().to(place),
            torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5),
        )

        def closure(model=model, data=data, update=update):
            update.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            update.step(closure)
    assert difference(plain, there) <= 1e-6


def test_sparse_adam(two):
    make = lambda: nn.Embedding(20, 8, sparse=True)  # noqa: E731
    torch.manual_seed(0)
    plain = make()
    there = copy.deepcopy(plain).to(two[1])
    for model, place in ((plain, "cpu"), (there, two[1])):
        update = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        for _ in range(3):
            update.zero_grad()
            model(tokens().to(place)).square().mean().backward()
            update.step()
    assert (plain.weight - there.weight.cpu()).abs().max() == 0


def test_foreach_is_the_default_as_on_a_gpu(two):
    seen = []
    update = torch.optim.SGD(mlp().to(two[0]).parameters(), lr=0.1)
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for group in update.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    with Watch():
        update.step()
    assert any("_foreach_" in name for name in seen)


def test_clipping_schedulers_and_hooks(two):
    calls = []

    def after_backward(model):
        calls.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01).item())

    def make():
        model = mlp()
        model[0].register_forward_hook(lambda module, args, out: out * 2)
        model[2].register_full_backward_hook(
            lambda module, given, got: tuple(g * 3 for g in given)
        )
        model[0].weight.register_hook(lambda grad: grad * 0.5)
        return model

    # The norm is a sum over foreach's norms: the CPU takes the same path when told to.
    assert train(mlp, sequences(), device=two[1], after_backward=after_backward)[0] <= 1e-8
    assert calls[:3] == pytest.approx(calls[3:])
    torch.manual_seed(0)
    plain, there = make(), make()
    there.load_state_dict(plain.state_dict())
    there.to(two[1])
    for model, place in ((plain, "cpu"), (there, two[1])):
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(update, max_lr=0.5, total_steps=4)
        for _ in range(3):
            update.zero_grad()
            model(sequences().to(place)).square().mean().backward()
            update.step()
            schedule.step()
    assert difference(plain, there) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(two, dtype):
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 3)
    )
    there = copy.deepcopy(plain).to(two[1])
    outs = []
    for model, place in ((plain, torch.device("cpu")), (there, two[1])):
        with torch.autocast(place.type, dtype=dtype):
            out = model(images().to(place))
            assert out.dtype is dtype
            if place.type == "vgpu":  # a GPU's lists; the CPU's keep layer_norm in 16 bits
                assert out.softmax(1).dtype is F.layer_norm(out, (3,)).dtype is torch.float32
                assert torch.addcmul(out, out, out.float()).dtype is torch.float32
            loss = F.mse_loss(out.float(), torch.zeros_like(out, dtype=torch.float32))
        loss.backward()
        outs.append(loss.item())
    assert outs[0] == pytest.approx(outs[1], rel=1e-2)
    assert difference(plain, there) <= 1e-2


def test_grad_scaler(two):
    model, data = mlp().to(two[1]), sequences().to(two[1])
    update, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("vgpu")
    scaler.scale(model(data).square().mean()).backward()
    scaler.step(update)
    scaler.update()
    assert scaler.get_scale() == 65536


def test_no_grad_inference_and_eval(two):
    model, plain = encoder(0.1).to(two[1]).eval(), None
    plain = copy.deepcopy(model).cpu()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.allclose(
                model(sequences().to(two[1])).cpu(), plain(sequences()), atol=1e-6
            )


def test_random_numbers_are_the_devices_own(two):
    first, second = two
    torch.manual_seed(7)
    expected = torch.randn(5)
    torch.manual_seed(7)
    torch.randn(3)  # the host's numbers are not the devices'
    assert torch.equal(torch.randn(5, device=first).cpu(), expected)
    assert torch.equal(torch.randn(5, device=second).cpu(), expected)
    state = torch.vgpu.get_rng_state(first)
    one = torch.rand(4, device=first).cpu()
    torch.vgpu.set_rng_state(state, first)
    assert torch.equal(torch.rand(4, device=first).cpu(), one)
    with pytest.raises(
        RuntimeError, match="Expected a 'vgpu' device type for generator but found 'cpu'"
    ):
        torch.randn(2, device=first, generator=torch.Generator())


def test_a_step_across_two_devices(two):
    """A model on two devices, with a backward that crosses from the second to the first."""
    torch.manual_seed(0)
    plain = mlp()
    there = copy.deepcopy(plain)
    there[0].to(two[0])
    there[2].to(two[1])
    plain(sequences()).square().mean().backward()
    there[2](
        torch.tanh(there[0](sequences().to(two[0]))).to(two[1])
    ).square().mean().backward()
    assert difference(plain, there) == 0
    assert there[0].weight.grad.device == two[0] and there[2].weight.grad.device == two[1]


def test_backward_in_a_thread_of_the_users(two):
    from threading import Thread

    weight = torch.ones(3, device=two[1], requires_grad=True)
    thread = Thread(target=lambda: (weight * 2).sum().backward())
    thread.start()
    thread.join()
    assert weight.grad.tolist() == [2, 2, 2]
