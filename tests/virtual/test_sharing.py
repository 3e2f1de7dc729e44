"""Data loaders, pinned memory and other processes of a CUDA program."""

import pickle

import pytest
import torch
from torch import multiprocessing as mp
from torch.utils.data import DataLoader, Dataset, TensorDataset
from virtual_runs import virtual, write


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


HOGWILD = """
import torch
import torch.multiprocessing as mp
from torch import nn

def train(rank, model, rows, answers, received):
    assert model[0].weight.is_cuda and model[1].weight is model[0].weight
    assert rows.data_ptr() and torch.cuda.memory_allocated(1) == 0
    with torch.no_grad():
        model[0].weight.add_(rows.sum().item() + rank)
    answers.put(model[0].weight.detach().sum())
    received.wait()

if __name__ == "__main__":
    context = mp.get_context("spawn")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda()
    model[1].weight = model[0].weight
    nn.init.zeros_(model[0].weight)
    rows = torch.ones(2, device="cuda:1")
    for rank in range(2):
        answers, received = context.Queue(), context.Event()
        process = context.Process(target=train, args=(rank, model, rows, answers, received))
        process.start()
        answer = answers.get(timeout=60)
        received.set()
        process.join()
        print("answer", answer.device, answer.item(), "exit", process.exitcode)
    print("weight", model[1].weight[3, 3].item())
"""


def test_processes_train_one_model(tmp_path):
    """Hogwild training: a process gets the GPU's memory, and not a copy."""
    done = virtual(tmp_path, "--gpus", 2, write(tmp_path, HOGWILD))
    assert "answer cuda:0 32.0 exit 0" in done.stdout, done.stdout
    assert "answer cuda:0 80.0 exit 0" in done.stdout, done.stdout
    assert "weight 5.0" in done.stdout, done.stdout
