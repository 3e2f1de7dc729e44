"""The table of public cases: a repository before and after the fix of a bug.

`python tests/prove/public/cases.py` prints a line for each: name, repository, the two commits.
"""

from dataclasses import dataclass, field

TWO_RANKS = "torchrun --standalone --nproc-per-node=2"

# What the repositories import, beside the course's own packages; pip installs it without
# dependencies, into a folder of that name.
PACKAGES = {
    "none": "",
    "omegaconf": "omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 pyyaml",
    "speechbrain": "hyperpyyaml==1.2.2 ruamel.yaml==0.18.6 huggingface_hub==0.34.4 "
    "sentencepiece",
    "hugging-face": "transformers==4.53.3 tokenizers==0.21.4 huggingface_hub==0.34.4 "
    "safetensors==0.5.3 regex==2025.7.34",
    "trainer": "accelerate==1.9.0 tokenizers==0.21.4 huggingface_hub==0.34.4 "
    "safetensors==0.5.3 regex==2025.7.34 psutil",
    "nanogpt": "transformers==4.53.3 tokenizers==0.21.4 huggingface_hub==0.34.4 "
    "safetensors==0.5.3 regex==2025.7.34 tiktoken==0.9.0",
    "torchtune": "torchao==0.7.0 omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 "
    "tiktoken==0.9.0 blobfile==3.0.0 sentencepiece safetensors==0.5.3 regex==2025.7.34 "
    "huggingface_hub==0.34.4 tokenizers==0.21.4",
    "torchtune-tp": "torchao==0.11.0 torchdata==0.11.0 omegaconf==2.3.0 "
    "antlr4-python3-runtime==4.9.3 tiktoken==0.9.0 blobfile==3.0.0 sentencepiece "
    "safetensors==0.5.3 regex==2025.7.34 huggingface_hub==0.34.4 tokenizers==0.21.4",
}
OURS = "The repository's part runs unchanged; the loop, a small model and the rows are ours."
HOLDS = "it holds"


@dataclass(frozen=True)
class Case:
    """A public program, before and after a fix.

    name        the row's name, and the checkouts: NAME-before, NAME-after
    repository  the owner and the name
    before      the commit just before the fix, or the tag
    after       the commit of the fix, or the tag
    issue       the number of the issue, or of the pull request if there is no issue
    title       its title
    fix         the pull request
    command     what follows `multigpu prove`; {drivers} is the folder of our own programs
    reduced     what is smaller, or not the repository's own
    kind        what must be found before the fix, in words
    then        what must be found after it
    options     options of `multigpu prove`
    script      whether the command is a script of the repository: it runs in a copy of it
    smaller     for each file, pairs (literal, smaller literal)
    data        for each path that the script reads, the stand-in of tests/outside
    packages    a key of PACKAGES
    """

    name: str
    repository: str
    before: str
    after: str
    issue: int
    title: str
    fix: int
    command: str
    reduced: str
    kind: str
    then: str = HOLDS
    options: str = ""
    script: bool = False
    smaller: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    packages: str = "none"


CASES = (
    Case(
        "build-nanogpt",
        "karpathy/build-nanogpt",
        "01fd941f029c55bdc4d095fe6d74649e02a1c631",
        "f6d194b90f63ee6b7159974078ea60221c172617",
        30,
        "fix sync issue that results in incorrect gradient accumulation and incorrect loss",
        30,
        f"{TWO_RANKS} train_gpt2.py",
        "train_gpt2.py itself, smaller by its literals alone, on stand-in tokens and "
        "questions; bfloat16 on virtual GPUs.",
        "gradients are synchronized on the wrong micro-batch: the flag is set after forward, "
        "where DDP has already read it, so each rank steps with gradients of its own",
        options="--gpus 2",
        script=True,
        smaller={
            "train_gpt2.py": [
                ("total_batch_size = 524288", "total_batch_size = 512"),
                ("B = 64", "B = 4"),
                ("T = 1024", "T = 32"),
                ("n_layer: int = 12", "n_layer: int = 2"),
                ("n_head: int = 12", "n_head: int = 2"),
                ("n_embd: int = 768", "n_embd: int = 32"),
                ("vocab_size=50304", "vocab_size=256"),
                ("warmup_steps = 715", "warmup_steps = 2"),
                ("max_steps = 19073", "max_steps = 4"),
                ("val_loss_steps = 20", "val_loss_steps = 2"),
            ]
        },
        data={"edu_fineweb10B": "edu_fineweb10B", "hellaswag": "hellaswag"},
        packages="nanogpt",
    ),
    Case(
        "FunASR",
        "modelscope/FunASR",
        "6829ba7845052bf75e998ba9257552b0c8c2d510",
        "d410a5652de693f7bf0760a1054a4f3ec101318c",
        3472,
        "fix(train): align DDP no_sync with gradient accumulation",
        3472,
        f"{TWO_RANKS} {{drivers}}/funasr_trainer.py",
        "Trainer.train_epoch runs unchanged. The model, its wrapping in DDP (the trainer's "
        "wants a GPU) and the rows are ours.",
        "gradients are synchronized on the first of three micro-batches, not on the last, so "
        "each rank steps with gradients of its own",
        packages="omegaconf",
    ),
    Case(
        "transformers",
        "huggingface/transformers",
        "v4.53.3",
        "v4.54.0",
        34242,
        "Add DDP token averaging for equivalent non-parallel training similar to #34191",
        39395,
        f"{TWO_RANKS} {{drivers}}/transformers_trainer.py",
        "The Trainer with its defaults, and GPT-2 with one layer; the texts are ours. Two "
        "releases: the option came with #34373, and #39395 made it the default.",
        "each rank divides by its own number of tokens, then the ranks' means are averaged",
        packages="trainer",
    ),
    Case(
        "torchtune",
        "pytorch/torchtune",
        "cce8ef68145b8a1cdaa7b8a4f90f85edb827cf20",
        "e420bc0c733eafca563d7efa88fb8c0d1663137d",
        2172,
        "Fix gradient scaling to account for world_size normalization",
        2172,
        f"{TWO_RANKS} {{drivers}}/torchtune_recipe.py",
        "The recipe full_finetune_distributed.py, its Llama 3 with one layer, FSDP2, loss and "
        "collator run unchanged. Checkpoint, tokenizer and texts are ours; the GPU's memory "
        "is not logged.",
        "a factor of 1/2: FSDP2 averages over ranks what is divided by all ranks' tokens",
        packages="torchtune",
    ),
    Case(
        "torchtune-tp",
        "pytorch/torchtune",
        "dc79caa46fcba8e11b309c7dba413d1b4a0ab8ca",
        "137eec3d0e43b85363726ac0616726901da257f9",
        2687,
        "Fix grad scaling in Tensor Parallelism",
        2687,
        f"{TWO_RANKS} {{drivers}}/torchtune_tensor_parallel.py",
        "As torchtune, with the recipe's plan for tensor parallelism over all ranks, which "
        "read the same rows. The barrier gets no device's number.",
        "a factor of 1/2: the tokens of both tensor parallel ranks are counted, though they "
        "are the same",
        packages="torchtune-tp",
    ),
    Case(
        "verl-SpeCo",
        "verl-project/verl-SpeCo",
        "d35bd998ccf3a29d2e56edb2ea27d736914a4498",
        "e7bb7dfbb6a4fa7309a7de4e256b80eafd00fe71",
        29,
        "fix(trainer): stop scaling drafter gradients down by world size",
        29,
        f"{TWO_RANKS} {{drivers}}/verl_speco_trainer.py",
        "DrafterBaseTrainer._training_step_on_batch runs unchanged, with FSDP2. The drafter, "
        "its sums of losses (in float32) and the rows are ours; verl, which needs vLLM, is "
        "absent.",
        "a factor of 1/2: the loss is all-reduced without autograd, then FSDP2 averages",
        packages="omegaconf",
    ),
    Case(
        "lightly-sigreg",
        "lightly-ai/lightly",
        "335a02e53bef802e53e888c21a3dd29d3f0eabf0",
        "753643fd26d9d8a11c0270b5673c3f621c44eeaa",
        1920,
        "Fix SIGReg distributed gradient under DDP",
        1923,
        f"{TWO_RANKS} {{drivers}}/lightly_sigreg.py",
        OURS,
        "a factor of 1/2: sums are all-reduced without autograd, then DDP averages",
    ),
    Case(
        "lightly-gather",
        "lightly-ai/lightly",
        "ec9f6202f2680d1ee993263d522f28c9822cc3bf",
        "80fa5b5c6d3e28fc6f6eaa2286356830cb3d59dd",
        1528,
        "Bug in `GatherLayer.backward`",
        1531,
        f"{TWO_RANKS} {{drivers}}/lightly_gather.py",
        OURS,
        "gathered embeddings are constants for the other ranks' losses: a part of the "
        "gradient is missing, on all ranks alike",
    ),
    Case(
        "lightly-barlow",
        "lightly-ai/lightly",
        "6b5e8762f95336ff00bbc003a2619832f5f0b892",
        "d8a260d502a7c12d9f4bdd88c6eabf9d58decaf7",
        1977,
        "BarlowTwinsLoss with `gather_distributed=True` produces gradient which is off by "
        "`1/world_size` under DDP",
        1980,
        f"{TWO_RANKS} {{drivers}}/lightly_barlow.py",
        OURS,
        "the correlations are all-reduced without autograd, then DDP averages: about 1/2, but "
        "the loss also normalizes by each rank's own rows",
        then="it differs: the loss still normalizes by each rank's own rows",
    ),
    Case(
        "sentence-transformers",
        "UKPLab/sentence-transformers",
        "49a60f950fa54206f6e26d1e99c0a213a1d43c20",
        "c9c86c5621d8e9a75b0252e1c7bd24a0d804358d",
        3453,
        "[`fix`] Patch `gather_across_devices` for in-batch negatives losses",
        3453,
        f"{TWO_RANKS} {{drivers}}/sentence_transformers_gather.py",
        OURS,
        "the labels of rank 1 point at other rows than its own: its loss is another one",
        packages="hugging-face",
    ),
    Case(
        "speechbrain",
        "speechbrain/speechbrain",
        "0a39a1dfbe763373c83cb2f43a6f840fec11f9d3",
        "44dcf3dae7ba12809c5f087452cb958274e81897",
        2010,
        "Refactoring of the 'fit_batch' function",
        2010,
        f"{TWO_RANKS} {{drivers}}/speechbrain_brain.py",
        "Brain.fit runs unchanged; the model and the rows are ours; torchaudio is absent.",
        "it holds: no_sync around backward alone costs messages, for DDP still synchronizes "
        "each micro-batch, but the gradients are right",
        packages="speechbrain",
    ),
)


if __name__ == "__main__":
    for case in CASES:
        print(case.name, case.repository, case.before, case.after)
