"""nvidia-smi and NVML (pynvml) of virtual GPUs."""

import importlib
import sys

import pytest
import torch
from commands import run as run_process
from virtual_runs import virtual, write

import multigpu
from multigpu.errors import UserError
from multigpu.virtual import nvidia_smi, record
from multigpu.virtual import nvml as nvml_stand_in
from multigpu.virtual.options import VARIABLE, Options

# The query of GPUtil, which many programs read.
GPUTIL = (
    "index,uuid,utilization.gpu,memory.total,memory.used,memory.free,driver_version,name,"
    "gpu_serial,display_active,display_mode,temperature.gpu"
)
UUID = "GPU-00000000-0000-0000-0000-00000000000"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A run on two GPUs, of which no process has used one."""
    options = Options(gpus=2, gpu=("A100-80GB", "T4"))
    monkeypatch.setenv(VARIABLE, options.to_json())
    monkeypatch.setenv(record.VARIABLE, str(tmp_path))


def test_the_table_of_nvidia_smi(run):
    lines = nvidia_smi.output([])
    assert len({len(line) for line in lines[1:]}) == 1, "one width"
    rows = [line.split() for line in lines]
    assert ["|", "1", "T4", "(virtual)", "N/A", "|", "00000000:01:00.0"] in [
        row[:7] for row in rows
    ]
    assert any("No running processes found" in line for line in lines)


def test_what_programs_query(run):
    assert nvidia_smi.output(["-L"]) == [
        f"GPU 0: A100-80GB (virtual) (UUID: {UUID}0)",
        f"GPU 1: T4 (virtual) (UUID: {UUID}1)",
    ]
    query = [f"--query-gpu={GPUTIL}", "--format=csv,noheader,nounits"]
    assert nvidia_smi.output(query)[1] == (
        f"1, {UUID}1, 0, 16384, 0, 16384, 570.26, T4 (virtual), [N/A], Disabled, Disabled, "
        f"[N/A]"
    )
    query = ["-i", "0", "--query-gpu", "gpu_name,memory.free,power.draw,compute_cap"]
    assert nvidia_smi.output([*query, "--format=csv"]) == [
        "name, memory.free [MiB], power.draw [W], compute_cap",
        "A100-80GB (virtual), 81920 MiB, [N/A], 8.0",
    ]
    query = ["--query-compute-apps=pid,used_memory", "--format=csv"]
    assert nvidia_smi.output(query) == ["pid, used_gpu_memory [MiB]"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-q"], "unrecognized arguments: -q: use no option, -L, -i, --query-gpu="),
        (["--query-gpu=nam", "--format=csv"], 'Field "nam" is not a valid field to query'),
        (["--query-gpu=name"], '"--format=csv" is needed'),
    ],
)
def test_what_nvidia_smi_refuses(run, words, sentence):
    with pytest.raises(UserError, match=sentence):
        nvidia_smi.output(words)
    assert nvidia_smi.output(["-i", "2"]) == ["No devices were found"]


def test_nvidia_smi_and_pynvml_do_not_import_torch():
    code = (
        "import sys, multigpu.virtual.nvidia_smi; from multigpu.virtual import packages; "
        "sys.meta_path.insert(0, packages.Finder()); "
        "import pynvml; print('torch' in sys.modules)"
    )
    assert run_process("python", "-c", code).stdout == "False\n"


def test_pynvml_in_a_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    # Another test of this process can have called nvmlInit.
    monkeypatch.setattr(nvml_stand_in, "_inits", 0)
    with multigpu.gpus(gpu=["A100-80GB", "T4"]):
        x = torch.ones(2**20, device="cuda:1")
        nvml = importlib.import_module("pynvml")
        with pytest.raises(nvml.NVMLError_Uninitialized):
            nvml.nvmlDeviceGetCount()
        nvml.nvmlInit()
        assert nvml.nvmlDeviceGetCount() == 2
        with pytest.raises(nvml.NVMLError_InvalidArgument):
            nvml.nvmlDeviceGetHandleByIndex(2)
        t4 = nvml.nvmlDeviceGetHandleByIndex(1)
        assert nvml.nvmlDeviceGetName(t4) == torch.cuda.get_device_name(1) == "T4 (virtual)"
        assert nvml.nvmlDeviceGetUUID(t4) == f"{UUID}1"
        assert str(torch.cuda.get_device_properties(1).uuid) == f"{UUID}1".removeprefix("GPU-")
        assert nvml.nvmlDeviceGetCudaComputeCapability(t4) == (7, 5)
        memory = nvml.nvmlDeviceGetMemoryInfo(t4)
        assert memory.used == torch.cuda.memory_reserved(1) >= x.nbytes
        assert memory.total == memory.used + memory.free == 16 * 2**30
        for unknown in (
            lambda: nvml.nvmlDeviceGetTemperature(t4, nvml.NVML_TEMPERATURE_GPU),
            lambda: nvml.nvmlDeviceGetPowerUsage(t4),
            torch.cuda.temperature,
        ):
            with pytest.raises(nvml.NVMLError_NotSupported, match="leave the call out, or"):
                unknown()
        with pytest.raises(nvml.NVMLError, match="nvmlDeviceGetFanSpeed has no value"):
            nvml.nvmlDeviceGetFanSpeed(t4)
        nvml.nvmlShutdown()


PROGRAM = """
import os, subprocess, sys
import pynvml
from pynvml import *

def smi(*words):
    return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True).stdout

def used():
    nvmlInit()
    handles = [nvmlDeviceGetHandleByIndex(i) for i in range(nvmlDeviceGetCount())]
    by_nvml = [nvmlDeviceGetMemoryInfo(handle).used >> 20 for handle in handles]
    words = ["--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    assert by_nvml == [int(line) for line in smi(*words).splitlines()]
    return by_nvml

print("before", used())
code = '''
import os, torch
x = torch.ones(2**20, device="cuda")
print(os.getpid(), flush=True)
input()
'''
environment = os.environ | {"CUDA_VISIBLE_DEVICES": "1"}
child = subprocess.Popen(
    [sys.executable, "-c", code],
    env=environment,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
)
pid = int(child.stdout.readline())
print("while a child has memory", used())
apps = smi("--query-compute-apps=pid,used_memory", "--format=csv,noheader")
assert apps == f"{pid}, 20 MiB\\n", apps
import torch
y = torch.ones(3 * 2**20, device="cuda:1")
print("with its own", used(), torch.cuda.device_memory_used(1) >> 20)
os.kill(pid, 9)
child.wait()
print("after the child", used(), torch.cuda.utilization(0))
"""


@pytest.mark.slow
def test_memory_in_use_is_that_of_all_processes(tmp_path):
    done = virtual(tmp_path, "--gpus", 2, write(tmp_path, PROGRAM))
    assert done.stdout.startswith(
        "before [0, 0]\n"
        "while a child has memory [0, 20]\n"
        "with its own [0, 32] 32\n"
        "after the child [0, 12] 0\n"
    ), done.stdout
