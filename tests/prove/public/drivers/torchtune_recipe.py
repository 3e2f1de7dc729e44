"""torchtune's recipe for a full finetuning with FSDP2: recipes/full_finetune_distributed.py.

The recipe, its model, loss and collator are the repository's. The checkpoint, the tokenizer
and the texts are small ones of our own; memory is not logged.
"""

import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import tiny
import torch

tiny.absent("datasets", "datasets.distributed", "torchvision", "torchvision.transforms")
tiny.absent("torchvision.transforms.v2", "torchvision.transforms.v2.functional")

from omegaconf import OmegaConf  # noqa: E402
from torchtune import config, training  # noqa: E402

ROWS = 8  # in a step, of all ranks together
IGNORED = -100
CONFIG = {
    "device": "cpu",
    "dtype": "fp32",
    "seed": 0,
    "output_dir": "unused",
    "epochs": 1,
    "max_steps_per_epoch": None,
    "resume_from_checkpoint": False,
    "gradient_accumulation_steps": 1,
    "shuffle": False,
    "batch_size": ROWS // int(os.environ["WORLD_SIZE"]),
    "checkpointer": {"model_type": "LLAMA3"},
    "metric_logger": {"_component_": "torchtune_recipe.Logger"},
    "model": {
        "_component_": "torchtune.models.llama3.llama3",
        "vocab_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "embed_dim": 16,
        "max_seq_len": 16,
    },
    "tokenizer": {"_component_": "torchtune_recipe.Tokenizer"},
    "dataset": {"_component_": "torchtune_recipe.Texts"},
    "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1},
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
}


class Logger:
    def log_config(self, config) -> None:
        pass

    def log_dict(self, values: dict, step: int) -> None:
        print(f"loss {values['loss']:.4f}")

    def close(self) -> None:
        pass


class Tokenizer:
    pad_id = 0


class Texts(list):
    """Texts of 4 to 12 tokens; the first of each, its prompt, does not count in the loss."""

    def __init__(self, tokenizer):
        numbers = torch.Generator().manual_seed(1)
        for number in range(ROWS * tiny.STEPS):
            length = 4 + 5 * number % 9
            tokens = torch.randint(1, 32, (length,), generator=numbers).tolist()
            self.append({"tokens": tokens, "labels": [IGNORED, *tokens[1:]]})


def weights(configuration) -> dict[str, torch.Tensor]:
    """The base checkpoint: the same random weights in each rank."""
    torch.manual_seed(0)
    return config.instantiate(configuration.model).state_dict()


def recipe_class() -> type:
    path = Path(find_spec("torchtune").origin).parents[1]
    spec = spec_from_file_location("recipe", path / "recipes/full_finetune_distributed.py")
    module = sys.modules["recipe"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FullFinetuneRecipeDistributed


def train(configuration) -> None:
    """Run the recipe; the process group is there, or the recipe makes it."""
    training.get_memory_stats = lambda device: {}
    training.log_memory_stats = lambda stats: None
    training.cleanup_before_training = lambda: None
    recipe = recipe_class()(configuration)
    recipe._checkpoint_client = SimpleNamespace(
        load_base_checkpoint=lambda: {training.MODEL_KEY: weights(configuration)},
        save_checkpoint=lambda **given: None,
    )
    recipe.setup(configuration)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    tiny.start()
    train(OmegaConf.create(CONFIG))
