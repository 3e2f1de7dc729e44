"""The CPU draws random numbers and divides batches as GPUs do, so that losses can be equal.

- A GPU has a random generator of its own, which torch.manual_seed gives the same seed. Here
  the CPU keeps a second state for what a script draws on its GPU: dropout, factories that are
  given a device, and what an entry of cases/ wraps in `on_gpu`.
- nn.DataParallel gives each GPU a part of the batch and its own copy of the buffers, of which
  the first GPU's are kept.
- nn.SyncBatchNorm takes no tensor of the CPU: `sync_batchnorm` puts the same mean and variance
  over all ranks in its place.
"""

import functools

import torch


def install(gpus):
    """Replace torch's functions. Until the process ends: it runs nothing else."""
    _draw_as_a_gpu()
    _divide_as_gpus(gpus)


def on_gpu(function):
    """`function`, drawing from the GPU's generator."""

    @functools.wraps(function)
    def drawn(*given, **options):
        host = torch.get_rng_state()
        torch.set_rng_state(_own.get_state())
        try:
            return function(*given, **options)
        finally:
            _own.set_state(torch.get_rng_state())
            torch.set_rng_state(host)

    return drawn


_own = torch.Generator()


def _draw_as_a_gpu():
    seed_host = torch.manual_seed

    def manual_seed(seed):
        _own.manual_seed(seed)
        return seed_host(seed)

    _own.manual_seed(torch.initial_seed())
    torch.manual_seed = torch.random.manual_seed = manual_seed
    functional = torch.nn.functional
    for name in ("dropout", "dropout1d", "dropout2d", "scaled_dot_product_attention"):
        setattr(functional, name, on_gpu(getattr(functional, name)))
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        setattr(torch._VF, name, on_gpu(getattr(torch._VF, name)))
    for name in ("randn_like", "rand_like", "randint_like"):
        setattr(torch, name, on_gpu(getattr(torch, name)))
    for name in ("randn", "rand", "randint", "randperm"):
        setattr(torch, name, _on_gpu_if_given_a_device(getattr(torch, name)))


def _on_gpu_if_given_a_device(function):
    drawn = on_gpu(function)

    @functools.wraps(function)
    def call(*given, **options):
        if options.get("device") is None or options.get("generator") is not None:
            return function(*given, **options)
        return drawn(*given, **options)

    return call


def data_parallel(module, batch, gpus):
    """nn.parallel.data_parallel, with the parts one after the other on the CPU."""
    return torch.cat(_of_parts(module, gpus, batch))


def data_parallel_with(module, gpus, *tensors):
    """The same for a module that takes more tensors, and returns a loss and a tensor."""
    outputs = _of_parts(module, gpus, *tensors)
    return torch.stack([one[0] for one in outputs]), torch.cat([one[1] for one in outputs])


def _of_parts(module, gpus, *tensors):
    parts = list(zip(*(tensor.chunk(gpus) for tensor in tensors), strict=True))
    named = dict(module.named_parameters())
    copies = zip(*(_Copies.apply(one, len(parts)) for one in named.values()), strict=True)
    outputs = []
    for part, parameters in zip(parts, copies, strict=True):
        buffers = _copied(module.named_buffers()) if outputs else dict(module.named_buffers())
        weights = {**dict(zip(named, parameters, strict=True)), **buffers}
        outputs.append(torch.func.functional_call(module, weights, part))
    return outputs


class _Copies(torch.autograd.Function):
    """A parameter for each part, whose gradients are added from the first to the last."""

    @staticmethod
    def forward(ctx, parameter, count):
        return tuple(parameter.view_as(parameter) for _ in range(count))

    @staticmethod
    def backward(ctx, *gradients):
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient
        return total, None


def _divide_as_gpus(gpus):
    def forward(parallel, batch):
        return data_parallel(parallel.module, batch, gpus)

    torch.nn.DataParallel.forward = forward


def sync_batchnorm(module):
    """nn.SyncBatchNorm.convert_sync_batchnorm, for the CPU."""
    for part in module.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.forward = functools.partial(_over_all_ranks, part)
    return module


def _over_all_ranks(norm, batch):
    from torch.distributed.nn.functional import all_reduce

    if not norm.training:
        return torch.nn.BatchNorm2d.forward(norm, batch)
    # In float64: GPUs add in another order, and this is nearest to all of them.
    values = batch.double()
    count = batch.numel() / batch.size(1) * torch.distributed.get_world_size()
    mean = all_reduce(values.sum((0, 2, 3))) / count
    centred = values - mean[:, None, None]
    variance = all_reduce(centred.square().sum((0, 2, 3))) / count
    norm.num_batches_tracked += 1
    norm.running_mean.lerp_(mean.detach().float(), norm.momentum)
    norm.running_var.lerp_((variance.detach() * count / (count - 1)).float(), norm.momentum)
    scale = norm.weight * torch.rsqrt(variance + norm.eps)
    return (centred * scale[:, None, None] + norm.bias[:, None, None]).float()


def _copied(buffers):
    return {name: buffer.clone() for name, buffer in buffers}
