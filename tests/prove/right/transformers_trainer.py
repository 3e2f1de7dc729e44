"""transformers' Trainer with a tiny GPT-2, from a configuration, on random tokens."""

import argparse
import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()

BATCH_SIZE = 8
world = int(os.environ.get("WORLD_SIZE", 1))
set_seed(0)
sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 24, "n_layer": 1, "n_head": 4}
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
config = GPT2Config(**sizes, **no_dropout, bos_token_id=1, eos_token_id=2)
model = GPT2LMHeadModel(config)


class Sequences(torch.utils.data.Dataset):
    """Sequences of 4 to 16 tokens; padding has the label -100."""

    def __len__(self):
        return 48

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        tokens = torch.randint(3, 64, (16,), generator=generator)
        mask = torch.arange(16) < 4 + i % 13
        return {
            "input_ids": tokens * mask,
            "attention_mask": mask.long(),
            "labels": tokens.masked_fill(~mask, -100),
        }


arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=BATCH_SIZE // world // args.accumulate,
    gradient_accumulation_steps=args.accumulate,
    max_steps=6,
    learning_rate=1e-3,
    bf16=args.bf16,
    use_cpu=not torch.cuda.is_available(),
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=Sequences()).train()
