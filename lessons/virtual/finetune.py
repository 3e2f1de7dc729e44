"""Fine-tune a Hugging Face model on GPUs: `torchrun --nproc-per-node=2 finetune.py --lora`.

Needs `pip install transformers peft`. The model is a Llama from a configuration, so nothing is
downloaded. It learns the bytes of a text, by default of this file.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, LlamaConfig

MODELS = {  # layers, hidden size, heads, intermediate size, words
    "tiny": (2, 64, 4, 176, 256),
    "7b": (32, 4096, 32, 11_008, 32_000),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--lora", action="store_true", help="train adapters, not all weights")
    parser.add_argument("--fsdp", action="store_true", help="shard the model, in place of DDP")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of all ranks")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    # Set up the ranks.
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # Design the model.
    layers, hidden, heads, intermediate, words = MODELS[args.model]
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        vocab_size=words,
        use_cache=False,
    )
    # Frozen weights can be in 16 bit; those that AdamW changes by small steps stay in 32 bit.
    dtype = torch.bfloat16 if args.bf16 and args.lora else torch.float32
    # The 7b is for `multigpu virtual --shapes-only`: its weights get memory, and no values.
    torch.manual_seed(0)
    with torch.device("meta" if args.model == "7b" else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if args.lora:
            model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    if args.fsdp:
        # Each layer moves to the GPU, which keeps its shard. The policy replaces autocast,
        # which would keep all gathered weights in 16 bit until the end of forward.
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        policy = MixedPrecisionPolicy(**dtypes if args.bf16 else {})
        for layer in model.get_decoder().layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    if args.model == "7b":
        model.to_empty(device=device)
    else:
        model.to(device)
    if not args.fsdp:
        model = DistributedDataParallel(model, device_ids=[device.index])
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)

    # Read in the data: 80 sequences, from the text again and again.
    text = torch.tensor(list(args.text.read_bytes()))
    text = text.repeat(80 * args.length // len(text) + 1)
    sequences = text[: 80 * args.length].view(80, args.length)
    sampler = DistributedSampler(sequences, world_size, rank, drop_last=True)
    loader = DataLoader(
        sequences, args.batch_size // world_size, sampler=sampler, drop_last=True
    )

    # Train.
    model.train()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for tokens in loader:
            tokens = tokens.to(device)
            with torch.autocast("cuda", torch.bfloat16, enabled=args.bf16 and not args.fsdp):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {mean.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
