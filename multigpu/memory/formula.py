"""How many bytes a training step of a GPT needs on one GPU, and what they are for.

The GPT is that of scripts/PT_GPT_Memory.py: pre-norm blocks, no dropout, biases in the blocks'
linear layers, a head that is not tied to the embedding. The step is the second or a later one,
when the optimizer's state exists. With s tokens in a sequence, b sequences, h hidden units, a
heads and a vocabulary of V, a block keeps for backward, in bytes:

                              fp32                bf16-mixed           Korthikanti et al.
    inputs of the two norms   8 sbh               8 sbh                4 sbh
    inputs of qkv and up      8 sbh               4 sbh                4 sbh
    q, k, v                  12 sbh               6 sbh                6 sbh
    input of out              4 sbh               2 sbh                2 sbh
    inputs of GELU and down  32 sbh              16 sbh               16 sbh
    dropout                   none                none                 2 sbh + 1 as²b + 2 as²b
    softmax, flash            4 asb               4 asb                none
    softmax, math             4 as²b + s²         6 as²b + s²          2 as²b
    together, flash          64 sbh              36 sbh               34 sbh + 5 as²b (math)

Korthikanti et al. (2022), "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198), section 4.1, count a model in 16 bit with dropout. Autocast instead leaves
the residual stream and the softmax in 32 bit.

Selective checkpointing computes softmax and its two products again (their section 5), full
checkpointing the whole block, of which it keeps the input: 4 sbh.
"""

from dataclasses import dataclass

from multigpu.errors import UserError, any_of, did_you_mean
from multigpu.virtual.sim.presets import Gpu

OPTIMIZERS = ("adamw", "sgd")
PRECISIONS = ("fp32", "bf16-mixed")
CHECKPOINTING = ("none", "selective", "full")
ATTENTION = ("flash", "math")
KIB = 1024


@dataclass(frozen=True)
class Model:
    """A GPT's shape. `heads` divides `hidden`."""

    layers: int
    hidden: int
    heads: int
    tokens: int = 2048
    vocabulary: int = 51_200

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if number < 1:
                raise UserError(f"--{name} is {number}: give a number from 1 up.")
        if self.hidden % self.heads:
            raise UserError(
                f"{self.heads} heads cannot share {self.hidden} hidden units evenly: give a "
                f"number of heads that divides {self.hidden}."
            )

    @property
    def block(self) -> int:
        """The weights of one block: 12 h² in matrices, 13 h in biases and norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def head(self) -> int:
        """The weights of the head, and of the word embedding."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """The number of all weights."""
        last_norm = 2 * self.hidden
        places = self.tokens * self.hidden
        return self.layers * self.block + 2 * self.head + places + last_norm


# Layers, hidden units and heads of Brown et al. (2020), "Language Models are Few-Shot
# Learners", table 2.1; 1.3b has 16 heads here, and 13b 5,120 hidden units: heads divide.
MODELS = {
    "gpt-125m": Model(12, 768, 12),
    "gpt-350m": Model(24, 1024, 16),
    "gpt-760m": Model(24, 1536, 16),
    "gpt-1.3b": Model(24, 2048, 16),
    "gpt-2.7b": Model(32, 2560, 32),
    "gpt-7b": Model(32, 4096, 32),
    "gpt-13b": Model(40, 5120, 40),
    "gpt-175b": Model(96, 12288, 96),
}


@dataclass(frozen=True)
class Training:
    """How it is trained: `batch` sequences in a step, and a name of each list above."""

    batch: int = 1
    optimizer: str = "adamw"
    precision: str = "fp32"
    checkpointing: str = "none"
    attention: str = "flash"

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UserError(f"--batch is {self.batch}: give a number of sequences from 1 up.")
        choices = {
            "optimizer": OPTIMIZERS,
            "precision": PRECISIONS,
            "checkpointing": CHECKPOINTING,
            "attention": ATTENTION,
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                raise UserError(f"--{name} is {value!r}: give {any_of(known)}.")


def find_model(name: str) -> Model:
    """The model of this name, "gpt-7b" or "7b". Raises UserError for an unknown one."""
    if f"gpt-{name}" in MODELS:
        return MODELS[f"gpt-{name}"]
    if name not in MODELS:
        hint = did_you_mean(name, MODELS) or f"use one of {', '.join(MODELS)}"
        raise UserError(
            f"there is no model {name!r}: {hint.rstrip('.')} or give --layers, --hidden and "
            f"--heads."
        )
    return MODELS[name]


@dataclass(frozen=True)
class Step:
    """The bytes of a training step of `model`, on a GPU like `gpu`."""

    model: Model
    training: Training
    gpu: Gpu

    # ---- units: numbers of elements, and bytes of an element

    @property
    def mixed(self) -> bool:
        return self.training.precision == "bf16-mixed"

    @property
    def size(self) -> int:
        """Bytes of an element in the matrix products."""
        return 2 if self.mixed else 4

    @property
    def hidden(self) -> int:
        """sbh: the hidden units of all tokens."""
        return self.model.tokens * self.training.batch * self.model.hidden

    @property
    def pairs(self) -> int:
        """as²b: the scores of one block."""
        return self.model.heads * self.model.tokens**2 * self.training.batch

    @property
    def logits(self) -> int:
        """sbV: the logits of all tokens."""
        return self.model.tokens * self.training.batch * self.model.vocabulary

    # ---- what a block keeps for backward

    def core(self) -> int:
        """Bytes that attention keeps beside q, k, v and its output."""
        if self.training.attention == "flash":
            return 4 * self.model.heads * self.model.tokens * self.training.batch
        mask = self.model.tokens**2
        # Autocast computes softmax in 32 bit, and casts its output for the product with v.
        return (6 if self.mixed else 4) * self.pairs + mask

    def whole_block(self) -> int:
        """Bytes that a block keeps without checkpointing."""
        norms = 8 * self.hidden + 16 * self.model.tokens * self.training.batch
        return norms + 14 * self.size * self.hidden + self.core()

    def kept_block(self) -> int:
        """Bytes that a block keeps until its backward, with this checkpointing."""
        if self.training.checkpointing == "full":
            return 4 * self.hidden
        if self.training.checkpointing == "selective":
            return self.whole_block() - self.core()
        return self.whole_block()

    # ---- what backward of a block needs for a while

    def mlp_backward(self) -> int:
        """Bytes beyond the block's at `down`: gradients of its output and of its input."""
        cast = 2 * self.hidden if self.mixed else 0
        return 4 * self.hidden + cast + 4 * self.size * self.hidden

    def core_backward(self) -> int:
        """Bytes beyond the block's in backward of the softmax, when the MLP's part is freed.

        There are four tensors of scores in 32 bit: the probabilities, their gradient, that of
        the scores, and a product that CUDA's kernel makes of the first two.
        """
        if self.training.attention == "flash":
            return 0
        freed = 4 * self.hidden + 9 * self.size * self.hidden
        gradients = 4 * self.hidden + 2 * self.size * self.hidden
        return 16 * self.pairs - (self.core() - self.model.tokens**2) - freed + gradients

    def again(self) -> int:
        """Bytes that checkpointing computes again for one block's backward."""
        return self.whole_block() - self.kept_block()

    # ---- the step

    def state(self) -> dict[str, int]:
        """Bytes that are there at any time: weights, optimizer state, cuBLAS's workspaces."""
        weights = 4 * self.model.weights
        hopper = self.gpu.capability[0] >= 9
        return {
            "weights": weights,
            "optimizer": weights * (2 if self.training.optimizer == "adamw" else 1),
            "workspaces": 2 * (32 * KIB**2 if hopper else 8320 * KIB),
        }

    def moments(self) -> dict[str, dict[str, int]]:
        """{moment: {part: bytes}}: the moments of a step of which one has the peak."""
        model, blocks = self.model, self.model.layers
        # The matrices that autocast has cast, with their biases.
        copies = 2 * (blocks * (model.block - 4 * model.hidden) + model.head) * self.mixed
        of_block = 2 * (model.block - 4 * model.hidden) * self.mixed
        end = (4 + self.size) * self.hidden  # inputs of the last norm and of the head
        kept = blocks * self.kept_block()
        full = self.training.checkpointing == "full"
        in_block = self.again() + max(self.mlp_backward(), self.core_backward())
        weights = 4 * model.weights
        moments = {
            # The logits, in mixed precision in 16 and 32 bit, and their log-softmax in 32.
            "end of forward": {
                "activations": kept + end,
                "16-bit copies": copies,
                "logits": (10 if self.mixed else 8) * self.logits,
            },
            # Log-softmax, its gradient, and that of the logits, in 32 bit; in mixed precision
            # log-softmax in 16 and 32 bit, and its gradient. The cast weights of blocks that
            # are computed again are gone: they were autocast's cache.
            "backward of the loss": {
                "activations": kept + end,
                "16-bit copies": 2 * model.head * self.mixed if full else copies,
                "logits": (10 if self.mixed else 12) * self.logits,
            },
            "backward of the last block": {
                "activations": kept,
                "16-bit copies": of_block if full else copies - 2 * model.head * self.mixed,
                "gradients": 4 * model.head,
                "temporaries": in_block,
            },
            "backward of the first block": {
                "activations": self.kept_block(),
                "16-bit copies": of_block,
                "gradients": weights - 4 * (model.block + model.head),
                "temporaries": in_block,
            },
            # AdamW's kernels for lists of tensors (foreach) take a root of each weight's
            # second moment.
            "optimizer's step": {
                "gradients": weights,
                "temporaries": weights if self.training.optimizer == "adamw" else 0,
            },
        }
        return {name: self.state() | parts for name, parts in moments.items()}

    def peak(self) -> tuple[str, int]:
        """The moment with the most bytes, and how many they are."""
        totals = {name: sum(parts.values()) for name, parts in self.moments().items()}
        name = max(totals, key=totals.__getitem__)
        return name, totals[name]

    def shared_peak(self, gpus: int, stage: int) -> float:
        """The most bytes on each of so many GPUs, with DDP (0) or a stage of ZeRO, in torch.

        Stage 1 is DDP with ZeroRedundancyOptimizer. The others are fully_shard of each block
        and of the model: 2 with reshard_after_forward=False, which keeps whole weights beside
        a GPU's part, 3 with True. Backward of a block then has the weights of two blocks, and
        gradients that are not divided yet.
        """
        model, weights = self.model, 4 * self.model.weights
        outside = 4 * (2 * model.head + model.tokens * model.hidden)  # of the blocks
        peak = 0.0
        for name, parts in self.moments().items():
            is_step = name == "optimizer's step"
            held = sum(parts.values())
            if stage >= 1:
                shared = parts["optimizer"] + (parts["temporaries"] if is_step else 0)
                held -= shared - shared / gpus
            if stage < 2:
                held += weights  # DDP's buckets
            else:
                gradients = parts.get("gradients", 0)
                held += weights / gpus - (gradients - gradients / gpus)
                if name.endswith("block"):
                    held += 4 * (model.head + model.block)
            if stage == 3:
                held -= weights
                if not is_step:
                    held += outside + (8 * model.block if name.endswith("block") else 0)
            peak = max(peak, held)
        return peak
