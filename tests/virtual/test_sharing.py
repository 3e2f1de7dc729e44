"""Data loaders, pinned memory and other processes of a CUDA program."""

import pickle

import pytest
import torch
from torch import multiprocessing as mp
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Lazy(Dataset):
    """Rows that a worker could only make with the GPU."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(2, device="cuda") * index


def test_workers_and_pinned_memory(cuda):
    kept = torch.ones(2, device="cuda")  # CUDA is in use before the workers are forked
    loader = DataLoader(
        TensorDataset(torch.arange(8.0)),
        4,
        num_workers=1,
        pin_memory=True,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    for _ in range(2):
        rows = []
        for (batch,) in loader:
            assert batch.is_pinned()
            rows += batch.to("cuda", non_blocking=True).tolist()
        assert rows == list(range(8))
    assert kept.sum().item() == 2


def test_a_worker_cannot_use_the_gpu(cuda):
    torch.ones(2, device="cuda")
    loader = DataLoader(Lazy(), 2, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        list(loader)


def test_pinned_memory(cuda):
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned() and not torch.ones(4).is_pinned() and not pinned.is_cuda
    copied = pinned.cuda(non_blocking=True)
    assert copied.tolist() == [1, 1, 1, 1]
    with pytest.raises(RuntimeError, match="cannot pin 'cuda"):
        copied.pin_memory()


def test_tensors_of_a_gpu_are_shared_memory(cuda):
    tensor = torch.ones(2, device="cuda:1")
    assert tensor.is_shared() and tensor.share_memory_() is tensor
    assert not torch.ones(2).is_shared()
    assert torch.ones(2).share_memory_().is_shared()
    assert pickle.loads(pickle.dumps(tensor)).device == torch.device("cuda:1")


def test_a_tensor_in_a_queue_keeps_its_device(cuda):
    queue = mp.get_context("spawn").SimpleQueue()
    queue.put(torch.arange(3.0, device="cuda:1"))
    received = queue.get()
    assert received.tolist() == [0, 1, 2] and received.device == torch.device("cuda:1")
