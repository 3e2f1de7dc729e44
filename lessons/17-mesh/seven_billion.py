"""Train a GPT with 6.9 billion weights on a mesh of ranks; the tokens are random.

    multigpu virtual --world 64 --as-rank 0,32 --gpus-per-node 8 --gpu A100-80GB \\
        --link NVLink3 --between-nodes HDR200 --shapes-only --steps 2 \\
        lessons/17-mesh/seven_billion.py --mesh 2 1 16 2

It has the model and the layout of scripts/PT_GPT_Mesh.py: weights in bfloat16, parts of the
weights, gradients and AdamW's state in float32, and no activation checkpointing.
"""

import argparse
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import PT_GPT_Mesh as script


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT on a mesh of ranks.")
    parser.add_argument("--mesh", type=int, nargs=4, required=True, metavar=script.DIMENSIONS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--words", type=int, default=51_200)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=512, help="sequences of a step")
    parser.add_argument("--micro-batch", type=int, default=1, help="its sequences on a rank")
    parser.add_argument("--tensor", choices=["inside", "across"], default="inside")
    args = parser.parse_args()
    stages, copies, shards, _ = args.mesh
    rows = args.batch // (copies * shards)
    if math.prod(args.mesh) != int(os.environ["WORLD_SIZE"]) or rows % args.micro_batch:
        parser.error("--mesh fills the ranks, and --batch the micro-batches of its ranks")

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    order = [0, 1, 2, 3] if args.tensor == "inside" else [3, 0, 1, 2]
    sizes, names = zip(*((args.mesh[i], script.DIMENSIONS[i]) for i in order), strict=True)
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=names)
    index = mesh.get_local_rank("stages")
    with torch.device("meta"):  # no memory until the weights are divided
        model = script.GPT(args.layers, args.hidden, args.heads, args.length, args.words)
    stage = script.keep_stage(model, index, stages)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    script.divide(stage, mesh, mp_policy=policy)
    stage.to_empty(device=device)
    for weight in stage.parameters():
        nn.init.normal_(weight, std=0.02)
    optimizer = torch.optim.AdamW(stage.parameters(), fused=True)
    pipe = PipelineStage(stage, index, stages, device, group=mesh.get_group("stages"))
    schedule = Schedule1F1B(pipe, rows // args.micro_batch, loss_fn=script.mean_loss)
    tokens = torch.randint(args.words, (rows, args.length + 1), device=device)
    for _ in range(3):
        script.train_step(schedule, stage, optimizer, tokens)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
