"""Reserved memory, and requests that do not fit, against an H100 and CUDA's rules."""

import json
import sys

import pytest
import torch
from commands import ROOT

import multigpu

MIB = 2**20
H100 = json.loads((ROOT / "benchmarks" / "gpu" / "NVIDIA-H100-80GB-HBM3.json").read_text())


def rows(section: str) -> dict[str, dict]:
    return {row["case"]: row for row in H100["sections"][section]["rows"]}


def product_and_backward() -> None:
    a = torch.ones(512, 512, device="cuda", requires_grad=True)
    (a @ a).sum().backward()


def test_the_segments_of_an_h100():
    measured = rows("allocator")
    with multigpu.gpus(1, gpu="H100-80GB", shapes_only=True):
        product_and_backward()
        assert torch.cuda.memory_reserved() == measured["reserved then"]["bytes"]
        torch.cuda.empty_cache()
        kept = []
        for size in (513, MIB, MIB + 1, 10 * MIB, 10 * MIB + 1, 11 * MIB, 33 * MIB):
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            row = measured[f"a tensor of {size:,} bytes"]
            assert torch.cuda.memory_reserved() - reserved == row["reserved"], row
            # CUDA counts the whole block, with up to 1 MiB that is too little to be split off.
            blocks = {
                block["address"]: block["size"]
                for segment in torch.cuda.memory_snapshot()
                for block in segment["blocks"]
            }
            assert blocks[kept[-1].data_ptr()] == row["allocated"], row
            counted = torch.cuda.memory_allocated() - allocated
            assert 0 <= row["allocated"] - counted <= MIB, row


@pytest.fixture
def workloads(monkeypatch):
    """The models that the H100 has trained."""
    for folder in ("benchmarks", "benchmarks/gpu_sections", "scripts"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    before = set(sys.modules)
    import workloads

    yield workloads
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    "case", ["cnn fp32 1024", "cnn fp32 16384", "gpt fp32 4", "gpt bf16 4"]
)
def test_what_three_training_steps_reserve_on_an_h100(case, workloads):
    name, how, count = case.split()
    half = torch.bfloat16 if how == "bf16" else None
    with multigpu.gpus(1, gpu="H100-80GB", shapes_only=True) as (device,):
        product_and_backward()
        torch.cuda.empty_cache()
        model = workloads.new_model(name, workloads.FULL).to(device)
        batch = workloads.new_batch(name, workloads.FULL, int(count), device)
        step = workloads.training_step(model, batch, half)
        for _ in range(3):
            step()
        assert torch.cuda.max_memory_reserved() == rows("memory")[case]["reserved"]
        del model, batch, step


def test_fragmentation_fills_a_gpu():
    with multigpu.gpus(1, memory="96MiB", shapes_only=True):
        keep = [torch.empty(9 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
        del keep[::2]
        # 36 MiB are allocated, and 80 reserved, in four segments that all have a tensor.
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    for words in (
        "Tried to allocate 30.00 MiB. GPU 0 has a total capacity of 96.00 MiB of which 16.00",
        "this process has 80.00 MiB memory in use",
        "36.00 MiB is allocated by PyTorch, and 44.00 MiB is reserved by PyTorch but unalloc",
    ):
        assert words in str(caught.value)


def test_unused_segments_are_given_back_first():
    with multigpu.gpus(1, memory="96MiB", shapes_only=True):
        torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 60 * MIB
        kept = torch.empty(70 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == kept.nbytes
        assert torch.cuda.memory_stats()["num_alloc_retries"] == 1
        del kept
        torch.accelerator.empty_cache()
        assert torch.cuda.memory_reserved() == 0


def test_a_stream_has_its_own_memory():
    with multigpu.gpus(1, shapes_only=True):
        torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 40 * MIB


def test_settings_that_the_program_makes():
    with multigpu.gpus(1, memory="100MiB", shapes_only=True):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        keep = [torch.empty(9 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
        del keep[:4]
        assert torch.cuda.memory_snapshot()[0]["is_expandable"]
        # The 36 MiB of the four have one whole page, which goes to the end: 8 + 20 + 20 MiB.
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        assert kept.data_ptr() == keep[-1].data_ptr() + 9 * MIB
        assert torch.cuda.memory_reserved() == 100 * MIB
    with multigpu.gpus(1, shapes_only=True):
        torch.empty(1, device="cuda")
        assert not torch.cuda.memory_snapshot()[0]["is_expandable"]
