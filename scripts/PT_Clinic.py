"""Lesson 18: eight patients, small trainings on two ranks that hang, are slow, or are wrong.

    torchrun --standalone --nproc-per-node=2 scripts/PT_Clinic.py --patient condition
    sbatch slurm/PT_Clinic.slurm --patient order                        on a cluster

--cured mends a patient. Without GPUs the ranks compute on the CPU. Needs torch.
"""

import argparse
import json
import os
import random
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the process group is made: see lesson 05
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP


# Design the model
def new_model(outputs=10):
    """Images (batch, 64) → logits (batch, outputs)."""
    return nn.Sequential(nn.Linear(64, 32, bias=False), nn.Tanh(), nn.Linear(32, outputs))


# Train
def update(model, loss):
    """Backward; the mean of each gradient over the ranks; a step of gradient descent."""
    loss.backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
        weight.data -= 0.1 * weight.grad / dist.get_world_size()
        weight.grad = None
    return loss.detach()


# The patients: each trains the model on its rank's part of images (160, 64) and labels (160).
def condition(model, images, labels, rank, ranks, cured):
    """Rank 0 prints the mean loss of the last batch."""
    for x, y in zip(images.split(32), labels.split(32), strict=True):
        loss = update(model, F.cross_entropy(model(x[rank::ranks]), y[rank::ranks]))
    if rank == 0 or cured:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"mean loss {loss.item() / ranks:.4f}", flush=True)
    dist.barrier()  # all ranks have finished


def order(model, images, labels, rank, ranks, cured):
    """Two tasks, a model for each: which digit, and is it odd? Their order is drawn."""
    models = {"digit": model, "odd": new_model(2).to(images.device)}
    targets = {"digit": labels, "odd": labels % 2}
    draw = random.Random(0 if cured else rank)  # other random numbers on each rank
    tasks = list(models)
    for rows in torch.arange(len(images), device=images.device).split(32):
        mine = rows[rank::ranks]
        draw.shuffle(tasks)
        for task in tasks:
            logits = models[task](images[mine])
            update(models[task], F.cross_entropy(logits, targets[task][mine]))


def batches(model, images, labels, rank, ranks, cured):
    """The last 3 images are damaged. Each rank cuts its part of the others into batches."""
    part = slice(rank, 156 if cured else 157, ranks)
    for x, y in zip(images[part].split(13), labels[part].split(13), strict=True):
        update(model, F.cross_entropy(model(x), y))
    dist.barrier()  # all ranks have finished


def died(model, images, labels, rank, ranks, cured):
    """One image has the label 10: its digit cannot be read."""
    labels[37] = 10
    unreadable = {"ignore_index": 10} if cured else {}
    for x, y in zip(images.split(32), labels.split(32), strict=True):
        update(model, F.cross_entropy(model(x[rank::ranks]), y[rank::ranks], **unreadable))


def nan(model, images, labels, rank, ranks, cured):
    """The hidden vector is divided by its length. One image is blank."""
    images[37] = 0
    for step, (x, y) in enumerate(zip(images.split(32), labels.split(32), strict=True)):
        hidden = model[0](x[rank::ranks])
        squares = hidden.square().sum(1, keepdim=True)
        length = (squares + 1e-6).sqrt() if cured else squares.sqrt() + 1e-3
        loss = update(model, F.cross_entropy(model[2](hidden / length), y[rank::ranks]))
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


def slow(model, images, labels, rank, ranks, cured):
    """After each step the hits among all images are counted."""
    parts = list(zip(images.split(4), labels.split(4), strict=True))
    mine = parts[rank::ranks] if cured else parts if rank == 0 else []
    for x, y in zip(images.split(32), labels.split(32), strict=True):
        update(model, F.cross_entropy(model(x[rank::ranks]), y[rank::ranks]))
        hits = torch.zeros((), device=images.device)
        for x, y in mine:
            hits += (model(x).argmax(1) == y).sum()
        dist.all_reduce(hits)


def wrong(model, images, labels, rank, ranks, cured):
    """DDP averages the gradients."""
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    forward = ddp if cured else model
    for x, y in zip(images.split(32), labels.split(32), strict=True):
        F.cross_entropy(forward(x[rank::ranks]), y[rank::ranks]).backward()
        optimizer.step()
        optimizer.zero_grad()


PATIENTS = {one.__name__: one for one in (condition, order, batches, died, nan, slow, wrong)}


@record  # writes what ends a rank to torchrun's error file
def main():
    parser = argparse.ArgumentParser(description="Run a training that is ill, or --cured.")
    parser.add_argument("--patient", choices=[*PATIENTS, "network"], required=True)
    parser.add_argument("--cured", action="store_true")
    parser.add_argument("--timeout", type=float, default=4, help="seconds that a rank waits")
    parser.add_argument("--anomaly", action="store_true", help="stop where a NaN begins")
    parser.add_argument("--out", type=Path, default=Path("results/PT_Clinic"))
    args = parser.parse_args()
    if "RANK" not in os.environ or args.timeout <= 0:
        parser.error("start the ranks with torchrun, and give a --timeout above 0")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if args.patient == "network" and not args.cured:
        os.environ["MASTER_ADDR"] = "node07.invalid"  # the first node of another job
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))

    torch.manual_seed(0)
    images = torch.rand(160, 64).to(device)
    labels = images[:, :10].argmax(1)  # the brightest of the first ten pixels
    model = new_model().to(device)
    patient = PATIENTS.get(args.patient, wrong)
    with torch.autograd.set_detect_anomaly(args.anomaly):
        patient(model, images, labels.clone(), rank, ranks, args.cured)
    if rank == 0:
        loss = F.cross_entropy(model(images), labels).item()
        print(f"loss {loss:.4f}", flush=True)
        args.out.mkdir(parents=True, exist_ok=True)
        torch.save(model.cpu().state_dict(), args.out / "model.pt")
        (args.out / "metrics.json").write_text(json.dumps({"loss": loss}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
