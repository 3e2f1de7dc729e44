"""The storage of a tensor on a virtual GPU: its address, its size, and its memory."""

import pytest
import torch

from multigpu.virtual import control

KIB = 1024


def test_each_storage_has_an_address_and_views_have_an_offset(two):
    x = torch.ones(4, 8, device=two[0])
    y = torch.ones(4, 8, device=two[0])
    z = torch.ones(4, 8, device=two[1])
    addresses = [tensor.data_ptr() for tensor in (x, y, z)]
    assert len({0, *addresses}) == 4
    assert abs(addresses[0] - addresses[1]) >= x.nbytes, "the storages do not overlap"
    assert addresses == [tensor.data_ptr() for tensor in (x, y, z)]
    assert x[1:].data_ptr() == x.data_ptr() + 32
    assert x.detach().data_ptr() == x.untyped_storage().data_ptr() == x.data_ptr()
    assert torch.empty(0, device=two[0]).data_ptr() == 0
    x.add_(1)
    assert x.data_ptr() == addresses[0]


def test_a_storage_belongs_to_the_device(two):
    x = torch.arange(4.0, device=two[1])
    storage = x.untyped_storage()
    assert storage.nbytes() == storage.size() == 16
    assert storage.device == two[1]
    assert x.view(2, 2).untyped_storage() is storage
    assert isinstance(storage, torch.UntypedStorage)
    assert x._typed_storage().device == two[1]
    copied = storage.cpu()
    assert copied.device.type == "cpu"
    assert copied.nbytes() == 16


@pytest.mark.parametrize("compute", [True, False])
def test_resizing_a_storage_to_nothing_frees_its_memory(compute):
    with control.running(count=1, memory="65KiB", compute=compute) as (device,):
        x = torch.ones(4 * KIB, device=device)
        view = x.view(2, -1)[1]
        storage = x.untyped_storage()
        storage.resize_(0)
        assert torch.vgpu.memory_allocated() == 0
        assert storage.nbytes() == 0
        assert storage.data_ptr() == x.data_ptr() == 0
        other = torch.ones(12 * KIB, device=device)
        for use in (x.sum, x.cpu, lambda: other[: 4 * KIB].copy_(x), lambda: view.add_(1)):
            with pytest.raises(RuntimeError, match="has been resized to 0 bytes"):
                use()
        assert other.sum().item() == 12 * KIB if compute else True
        storage.resize_(x.nbytes)
        assert torch.vgpu.memory_allocated() == 64 * KIB
        assert x.data_ptr() == view.data_ptr() - 8 * KIB != 0
        x.fill_(3)
        if compute:
            assert view.sum().item() == 3 * 2 * KIB
