"""Compare simulated times with published tables, as ratios, with the error of each.

    python benchmarks/vgpu_fidelity.py

Everything is shape-only (compute=False), so it takes a minute on any machine. No constant of
the simulation was fitted to these tables. Peaks and bandwidths come from the data sheets. That
makes absolute speeds too high, so only ratios are compared. It writes
benchmarks/vgpu_fidelity.json.

Sources:
[T] PyTorch tutorials, "Single-Machine Model Parallel Best Practices" (Shen Li): ResNet-50,
    batch 120, 128×128 images, 3 batches. One GPU 3.75 s, two GPUs 4.02 s, pipeline with splits
    of 20 images 2.51 s. It does not name the GPU.
[N] NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md,
    container 21.03: ResNet-50, 224×224 images; training on DGX-1 16GB and DGX A100, inference
    on a V100. It does not give the training batch; here it is 128 images per GPU in FP32 (256
    do not fit into a V100's memory) and 256 otherwise.
"""

import json
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from resnet50 import halves, resnet50
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from multigpu import vgpu
from multigpu.files import write_json

HERE = Path(__file__).parent


def tutorial(
    kind: str, split: int = 20, gpu: str = "V100-16GB", link: str = "NVLink2"
) -> float:
    """Simulated seconds of the tutorial's `train`, 3 batches, after one batch to warm up."""
    with vgpu.running(count=2, gpu=gpu, link=link, compute=False) as (first, second):
        front, back = halves()
        front.to(first)
        back.to(first if kind == "one" else second)

        def model(images: torch.Tensor) -> torch.Tensor:
            if kind != "pipeline":
                return back(front(images.to(first)).to(back[-1].weight.device))
            splits = iter(images.to(first).split(split))
            outputs = []
            hidden = front(next(splits)).to(second)
            for micro_batch in splits:
                # The second device computes this micro-batch while the first works on the
                # next.
                outputs.append(back(hidden))
                hidden = front(micro_batch).to(second)
            return torch.cat([*outputs, back(hidden)])

        parameters = [*front.parameters(), *back.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.001)

        def train(batches: int) -> None:
            for _ in range(batches):
                images = torch.empty(120, 3, 128, 128)
                labels = torch.empty(120, 1000)
                optimizer.zero_grad()
                out = model(images)
                mse_loss(out, labels.to(out.device)).backward()
                optimizer.step()

        train(1)
        start = vgpu.elapsed()
        train(3)
        return vgpu.elapsed() - start


def training(
    gpu: str, link: str, batch: int, half: bool, device: torch.device, ddp: bool = False
) -> float:
    """Simulated seconds of one training step of ResNet-50 at 224×224 on the running device."""
    model: nn.Module = resnet50().to(device)
    if ddp:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.empty(batch, 3, 224, 224, device=device)
    labels = torch.empty(batch, dtype=torch.long, device=device)
    for step in range(3):
        if step == 2:
            start = vgpu.elapsed()
        optimizer.zero_grad()
        with torch.autocast("vgpu", dtype=torch.float16, enabled=half):
            loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return vgpu.elapsed() - start


def images_per_second(gpu: str, link: str, batch: int, half: bool = False) -> float:
    with vgpu.running(count=1, gpu=gpu, link=link, compute=False) as (device,):
        return batch / training(gpu, link, batch, half, device)


def inference_per_second(batch: int) -> float:
    with vgpu.running(count=1, compute=False) as (device,), torch.no_grad():
        model = resnet50().to(device).eval()
        images = torch.empty(batch, 3, 224, 224, device=device)
        model(images)
        start = vgpu.elapsed()
        model(images)
        return batch / (vgpu.elapsed() - start)


def one_rank(
    rank: int, ranks: int, port: int, gpu: str, link: str, batch: int, half: bool
) -> None:
    """A process of `many_gpus`: rank 0 prints its seconds per step."""
    with vgpu.running(count=1, gpu=gpu, link=link, compute=False) as (device,):
        store = dist.TCPStore(
            "127.0.0.1", port, ranks, is_master=rank == 0, timeout=timedelta(seconds=300)
        )
        dist.init_process_group("vgpu", store=store, rank=rank, world_size=ranks)
        seconds = training(gpu, link, batch, half, device, ddp=True)
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(seconds))


def many_gpus(gpu: str, link: str, batch: int, half: bool = False, ranks: int = 8) -> float:
    """Images/s of `ranks` processes with DDP ÷ images/s of one process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    numbers = [str(ranks), str(port), gpu, link, str(batch), str(int(half))]
    command = [sys.executable, __file__, *numbers]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("a rank has failed: its message is above")
    seconds = json.loads(outputs[0].splitlines()[-1])
    return ranks * batch / seconds / images_per_second(gpu, link, batch, half)


def main() -> None:
    rows = []

    def compare(source: str, what: str, published: float, simulated: float) -> None:
        error = simulated / published - 1
        rows.append(
            {
                "source": source,
                "quantity": what,
                "published": round(published, 3),
                "simulated": round(simulated, 3),
                "error": round(error, 3),
            }
        )
        print(
            f"[{source}] {what:<64} {published:>9.2f} {simulated:>9.2f} {error:>+8.0%}",
            flush=True,
        )

    print(f"{'ratio':<68} published simulated    error")
    one = tutorial("one")
    compare(
        "T", "model parallel on two GPUs / one GPU, time", 4.02 / 3.75, tutorial("two") / one
    )
    compare(
        "T",
        "one GPU / pipeline with splits of 20, time",
        3.75 / 2.51,
        one / tutorial("pipeline"),
    )
    v100 = images_per_second("V100-16GB", "NVLink2", 128)
    v100_half = images_per_second("V100-16GB", "NVLink2", 256, half=True)
    a100 = images_per_second("A100-80GB", "NVLink3", 256)
    a100_half = images_per_second("A100-80GB", "NVLink3", 256, half=True)
    compare("N", "V100, mixed precision / FP32, images/s", 1200 / 367, v100_half / v100)
    compare("N", "A100, mixed precision / TF32, images/s", 2470 / 938, a100_half / a100)
    compare("N", "A100 TF32 / V100 FP32, images/s", 938 / 367, a100 / v100)
    compare("N", "A100 / V100, mixed precision, images/s", 2470 / 1200, a100_half / v100_half)
    compare(
        "N",
        "V100 inference, batch 256 / batch 1, images/s",
        1261 / 96,
        inference_per_second(256) / inference_per_second(1),
    )
    compare(
        "N",
        "V100 inference, batch 32 / batch 8, images/s",
        1127 / 709,
        inference_per_second(32) / inference_per_second(8),
    )
    compare(
        "N",
        "8 V100 / 1, FP32 with DDP, images/s",
        2855 / 367,
        many_gpus("V100-16GB", "NVLink2", 128),
    )
    compare(
        "N",
        "8 V100 / 1, mixed precision with DDP, images/s",
        8322 / 1200,
        many_gpus("V100-16GB", "NVLink2", 256, half=True),
    )
    compare(
        "N",
        "8 A100 / 1, TF32 with DDP, images/s",
        7248 / 938,
        many_gpus("A100-80GB", "NVLink3", 256),
    )
    print(
        "for scale, not a ratio: images/s simulated",
        *(f"{rate:.0f}" for rate in (v100, v100_half, a100, a100_half)),
        "published 367 1200 938 2470",
    )
    write_json(
        HERE / "vgpu_fidelity.json",
        {
            "rows": rows,
            "description": "simulated and published ratios; sources: vgpu_fidelity.py",
        },
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        ranks, port, gpu, link, batch, half, rank = sys.argv[1:]
        one_rank(int(rank), int(ranks), int(port), gpu, link, int(batch), half == "1")
    else:
        main()
