"""transformers' Trainer with its defaults, on texts of different lengths: a small GPT-2."""

import os
import tempfile

import tiny
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

ROWS = 8  # in a step, of all ranks together
LENGTH = 12
IGNORED = -100


def texts() -> list[dict[str, torch.Tensor]]:
    """Token ids; only the first tokens of each text count in the loss, from 2 to all 12."""
    numbers = torch.Generator().manual_seed(1)
    rows = []
    for number in range(ROWS * tiny.STEPS):
        ids = torch.randint(32, (LENGTH,), generator=numbers)
        labels = ids.clone()
        labels[2 + 5 * number % (LENGTH - 1) :] = IGNORED
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=ROWS // int(os.environ["WORLD_SIZE"]),
            max_steps=tiny.STEPS,
            learning_rate=0.01,
            max_grad_norm=0,
            optim="sgd",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            ddp_backend="gloo",
        )
        Trainer(GPT2LMHeadModel(config), arguments, train_dataset=texts()).train()


if __name__ == "__main__":
    main()
