"""The precisions in which a GPU is measured, and the virtual GPU that simulates each."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from section import Section
from workloads import float32_products

from multigpu import Gpu
from multigpu.virtual import control

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def precisions(section: Section) -> list[str]:
    """fp32, and tf32 and bf16 if the GPU has such units; fp16 in place of a missing bf16."""
    gpu = section.card.gpu
    names = ["fp32"]
    if gpu.tf32 > gpu.fp32:
        names.append("tf32")
    return [*names, "bf16" if gpu.bf16 else "fp16"]


def report_missing(section: Section) -> None:
    """Report which of fp32, tf32 and bf16 this GPU does not have."""
    for name in ("tf32", "bf16"):
        if name not in precisions(section):
            section.skip(name, f"{section.card.name} has no {name} units")


def gpu_for(precision: str, gpu: Gpu) -> Gpu:
    """The Gpu that simulates `gpu` with this precision for products and convolutions.

    A Gpu computes products in full float32 and convolutions in TF32, as PyTorch does by
    default. For "fp32" its convolutions are as fast as its products; for "tf32" the reverse.
    A product in TF32 is then simulated with the shares of CUDA cores.
    """
    if precision == "fp32":
        return replace(gpu, tf32=gpu.fp32)
    # Just below, because equal peaks mean that the GPU has no TF32 units.
    return replace(gpu, fp32=0.999 * gpu.tf32) if precision == "tf32" else gpu


@contextmanager
def computing(precision: str) -> Iterator[torch.dtype | None]:
    """Within the block, a real GPU computes in this precision; yields autocast's dtype."""
    with float32_products(tf32=precision != "fp32"):
        yield HALF.get(precision)


@contextmanager
def simulating(precision: str, section: Section) -> Iterator[torch.device]:
    """Within the block, a virtual GPU of this precision runs, with shapes only."""
    with control.running(1, gpu=gpu_for(precision, section.card.gpu), compute=False) as (
        device,
    ):
        yield device
