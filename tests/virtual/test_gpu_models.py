"""The models of GPUs: presets, a GPU without bfloat16 units, different GPUs in one machine."""

import pytest
import torch
from compare_devices import last

from multigpu import GPUS
from multigpu.errors import UserError
from multigpu.virtual import control


def product_seconds(gpu: str, dtype: torch.dtype) -> float:
    with control.running(count=1, gpu=gpu, compute=False) as (device,):
        x = torch.empty(4096, 4096, dtype=dtype, device=device)
        x @ x
        return last().end - last().start


@pytest.mark.parametrize("gpu", ["V100-16GB", "T4"])
def test_without_bfloat16_units_a_product_in_it_is_no_faster_than_in_float32(gpu):
    """cuBLAS has no tensor cores for it there."""
    bfloat16 = product_seconds(gpu, torch.bfloat16)
    assert bfloat16 == pytest.approx(product_seconds(gpu, torch.float32), rel=1e-3)
    assert bfloat16 > 5 * product_seconds(gpu, torch.float16)
    assert product_seconds("A100-40GB", torch.bfloat16) == product_seconds(
        "A100-40GB", torch.float16
    )


def test_each_device_is_its_own_model():
    with control.running(gpu=["A100-80GB", "T4"], compute=False) as devices:
        assert control.label() == "simulated: 1 × A100-80GB + 1 × T4, NVLink2"
        took = []
        for device, name, capability in zip(
            devices, ("A100-80GB", "T4"), ((8, 0), (7, 5)), strict=True
        ):
            properties = torch.vgpu.get_device_properties(device)
            assert properties.name == f"{name} (virtual)"
            assert properties.total_memory == GPUS[name].memory
            assert properties.multi_processor_count == GPUS[name].shares.sms
            assert (properties.major, properties.minor) == capability
            with torch.vgpu.device(device):
                assert torch.vgpu.is_bf16_supported(including_emulation=False) is (
                    name == "A100-80GB"
                )
            x = torch.empty(4096, 4096, dtype=torch.float16, device=device)
            x @ x
            took.append(last().end - last().start)
            # Into pinned memory: into pageable memory the host's core is the limit.
            x.to("cpu", non_blocking=True)
        assert took[1] > 4 * took[0], "a T4 has a fifth of an A100's peak"
        copies = [event for event in control.timeline().events if event.kind == "transfer"]
        fast, slow = (copy.end - copy.start for copy in copies)
        assert slow == pytest.approx(2 * fast, rel=0.01), "PCIe 4 and PCIe 3"


def test_the_number_of_named_gpus_is_checked():
    with pytest.raises(UserError, match="2 GPUs are named: give one name for all, or 3"):
        control.start(3, gpu=["T4", "A10"])
    with pytest.raises(UserError, match='there is no GPU "T5"'):
        control.start(gpu=["T4", "T5"])
