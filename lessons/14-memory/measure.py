"""Two training steps of a GPT of any size, with random tokens, and the peak of its memory.

multigpu virtual --gpus 1 --gpu A100-80GB --shapes-only \
    lessons/14-memory/measure.py --layers 24 --hidden 2048 --heads 16

Without `multigpu virtual` it needs a GPU. `multigpu memory` predicts the same peak.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from PT_GPT_Memory import GPT, train_step


def new_optimizer(name, model):
    """AdamW, or SGD with momentum, as torch runs them on a GPU by default."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters())
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def peak_bytes(
    layers,
    hidden,
    heads,
    tokens,
    vocabulary,
    batch,
    optimizer,
    precision,
    checkpointing,
    attention,
):
    """The peak in the second step, which has the optimizer's state, on cuda:0, in bytes."""
    with torch.device("cuda:0"):
        model = GPT(layers, hidden, heads, tokens, vocabulary, attention, checkpointing)
        sequences = torch.randint(vocabulary, (batch, tokens + 1))
    steps = new_optimizer(optimizer, model)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        train_step(model, steps, sequences, precision == "bf16-mixed")
    return torch.cuda.max_memory_allocated()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("layers", "hidden", "heads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--vocabulary", type=int, default=51_200)
    parser.add_argument("--batch", type=int, default=1, help="sequences in a step")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--precision", choices=("fp32", "bf16-mixed"), default="fp32")
    ways = ("none", "selective", "full", "hand")
    parser.add_argument("--checkpointing", choices=ways, default="none")
    parser.add_argument("--attention", choices=("flash", "math"), default="flash")
    args = parser.parse_args()
    if min(args.layers, args.hidden, args.heads, args.tokens, args.vocabulary, args.batch) < 1:
        parser.error("all sizes are from 1 up")
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is not a multiple of --heads {args.heads}")
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: start it by `multigpu virtual --gpus 1 --shapes-only`.")
    print(f"peak: {peak_bytes(**vars(args)):,} bytes")


if __name__ == "__main__":
    main()
