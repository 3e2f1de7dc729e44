"""A checkpoint that ranks of another mesh can load: weights and AdamW's state."""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(stage, optimizer, folder):
    """Each rank writes its parts, under the names of the whole GPT."""
    model, optim = get_state_dict(stage, optimizer, options=FLAT)
    dcp.save({"model": model, "optimizer": optim}, checkpoint_id=folder)


def load(stage, optimizer, folder):
    """Each rank reads its parts of a checkpoint, which ranks of any mesh have written."""
    model, optim = get_state_dict(stage, optimizer, options=FLAT)
    dcp.load({"model": model, "optimizer": optim}, checkpoint_id=folder)
    read = {"model_state_dict": model, "optim_state_dict": optim}
    set_state_dict(stage, optimizer, **read, options=FLAT)
