"""What needs a real GPU says so in one sentence: packages, extensions, torch.compile."""

import importlib
import importlib.util
import sys

import pytest
import torch
from torch import nn

from multigpu.errors import UserError
from multigpu.virtual import left_out
from multigpu.virtual.packages import PACKAGES
from multigpu.virtual.patches.compiling import SENTENCE


@pytest.fixture(autouse=True)
def nothing_left_out(monkeypatch):
    monkeypatch.setattr(left_out, "notes", [])


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_that_is_not_installed(cuda, package, monkeypatch):
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(ImportError) as error:
        importlib.import_module(package)
    assert str(error.value).startswith(f"{package} does not run on virtual GPUs, because ")
    assert error.value.name == package and "\n" not in str(error.value)


def test_an_installed_package(cuda, tmp_path, monkeypatch):
    (tmp_path / "bitsandbytes.py").write_text("raise SystemError('was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="bitsandbytes does not run on virtual GPUs"):
        importlib.import_module("bitsandbytes")
    assert "bitsandbytes" not in sys.modules


def test_extensions_in_cuda(cuda):
    from torch.utils import cpp_extension

    for attempt in (
        lambda: cpp_extension.CUDAExtension("mine", ["mine.cu"]),
        lambda: cpp_extension.load("mine", ["mine.cpp", "mine.cu"]),
        lambda: cpp_extension.load_inline("mine", "", cuda_sources="__global__ void f() {}"),
    ):
        with pytest.raises(UserError, match="'mine' cannot be built, because a virtual GPU"):
            attempt()
    assert cpp_extension.CppExtension("mine", ["mine.cpp"]).name == "mine"


def test_torch_compile_is_left_out_and_said_once(cuda, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    model = nn.Linear(2, 2).cuda()
    rows = torch.ones(1, 2, device="cuda")
    expected = model(rows)

    @torch.compile(mode="reduce-overhead")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert torch.equal(torch.compile(model)(rows), expected)
    assert torch.equal(torch.compile(doubled, fullgraph=True)(rows), rows * 2)
    model.compile()
    assert torch.equal(model(rows), expected)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "torch.compile is left out" in said
    assert left_out.notes == [SENTENCE]


def test_other_ranks_do_not_say_it_again(cuda, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    torch.compile(nn.Linear(2, 2))
    assert capsys.readouterr().err == "" and left_out.notes == [SENTENCE]


def test_the_profiler_measures_the_host(cuda, capfd):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    matrix = torch.ones(4, 4, device="cuda")
    with torch.profiler.profile(activities=activities) as profile:
        matrix @ matrix
    with torch.autograd.profiler.profile(use_device="cuda"):
        matrix @ matrix
    assert "aten::mm" in profile.key_averages().table(sort_by="cuda_time_total")
    said = capfd.readouterr().err
    assert said.count("torch.profiler measures the host alone") == 1
    assert "Failed to record CUDA event" not in said


@pytest.mark.filterwarnings("ignore:.*export_memory_timeline")
def test_the_profiler_has_a_memory_timeline_of_the_host_alone(cuda, tmp_path):
    measured = {"record_shapes": True, "profile_memory": True, "with_stack": True}
    with torch.profiler.profile(**measured) as profile:
        nn.Linear(8, 8)(torch.ones(4, 8)).sum().backward()
    for device in ({}, {"device": "cuda:0"}):
        with pytest.raises(UserError, match="pass device='cpu'"):
            profile.export_memory_timeline(str(tmp_path / "memory.json"), **device)
    profile.export_memory_timeline(str(tmp_path / "memory.json"), device="cpu")
    assert (tmp_path / "memory.json").stat().st_size > 0


@torch.library.custom_op("virtual_tests::double", mutates_args=(), device_types="cuda")
def double(x: torch.Tensor) -> torch.Tensor:
    assert x.is_cuda
    return x * 2


def test_a_custom_operation_of_a_program_for_cuda(cuda):
    library = torch.library.Library("virtual_tests_more", "DEF")
    library.define("triple(Tensor x) -> Tensor")
    library.impl("triple", lambda x: x * 3, "CUDA")
    ones = torch.ones(2, device="cuda:1")
    for result, number in ((double(ones), 2), (torch.ops.virtual_tests_more.triple(ones), 3)):
        assert result.device == torch.device("cuda:1") and result.tolist() == [number] * 2
