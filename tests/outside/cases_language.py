"""Language models: build-nanogpt, LambdaLabs' guide to distributed training, picotron."""

from case import NUMBER, ON_GPU, Case

# What the guide's requirements.txt pins, and what these import.
TRANSFORMERS = (
    "transformers==4.57.0 datasets==4.1.1 huggingface_hub==0.36.2 tokenizers==0.22.2 pyarrow "
    "pandas dill multiprocess xxhash python-dateutil tzdata"
)
BUILD_NANOGPT = tuple(
    Case(
        f"build-nanogpt_{name}",
        "build-nanogpt",
        ".",
        f"{start} train_gpt2.py".strip(),
        gpus=gpus,
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
                ("max_steps = 19073", "max_steps = 7"),
                ("step % 250", "step % 3"),
                ("val_loss_steps = 20", "val_loss_steps = 2"),
            ]
        },
        data={"edu_fineweb10B": "edu_fineweb10B", "hellaswag": "hellaswag"},
        losses=rf"(?:loss|norm): {NUMBER}",
        # Autocast in bfloat16.
        reference="vgpu",
        packages=TRANSFORMERS,
    )
    for name, start, gpus in (
        ("one_gpu", "", 1),
        ("ddp", "torchrun --standalone --nproc_per_node=2", 2),
    )
)

LAMBDA = (
    "train_llm.py -d texts -m llama -b 2 -s 32 --num-epochs 1 --log-freq 2 --ckpt-freq 4 "
    "-e test --save-dir outputs --lr 1e-2"
)
LAMBDA_START = "torchrun --standalone --nproc-per-node"
# The CPU has no statistics of memory, and "gpu" counts none.
LAMBDA_ON_CPU = [
    (r"mem = torch\.cuda\.memory_stats\(device\)", "return {'curr_alloc_gb': 0}"),
    (r"torch\.cuda\.reset_peak_memory_stats\(device\)", "None"),
    (r"AutoModelForCausalLM\.from_config\(", f"{ON_GPU}(AutoModelForCausalLM.from_config)("),
    (r'f"cuda:{local_rank}"', '"cpu"'),
]
LAMBDA_UNSET = "init_weights() of its transformers leaves the memory of to_empty() unset"
LAMBDA_FLASH = [("flash_attention_2", "sdpa")]
# For each chapter: its GPUs, more flags, its reference. A DTensor's shards draw from an offset
# of the GPU's generator, which the CPU does not have.
CHAPTERS = {
    "01-single-gpu": (1, "", "CPU"),
    "02-distributed-data-parallel": (2, "", "CPU"),
    "04-fully-sharded-data-parallel": (2, "", "vgpu"),
    "06-tensor-parallel": (2, "", "vgpu"),
    "07-2d-parallel": (4, "-tp 2", "CPU"),
}
LAMBDALABS = tuple(
    Case(
        f"lambdalabs_{folder.replace('-', '_')}",
        "distributed-training-guide",
        folder,
        (f"{LAMBDA_START} gpu " if gpus > 1 else "") + f"{LAMBDA} {flags}".strip(),
        reference_command=(f"{LAMBDA_START} {gpus} " if gpus > 1 else "")
        + f"{LAMBDA} {flags}".strip(),
        gpus=gpus,
        # The package flash_attn has kernels for CUDA alone.
        smaller={"train_llm.py": LAMBDA_FLASH} if folder[1] in "67" else {},
        data={"texts": "texts", "llama": "llama"},
        losses=rf"'running_loss': {NUMBER}",
        reference=reference,
        translated={
            "train_llm.py": LAMBDA_ON_CPU[: 4 if gpus > 1 else 3] if reference == "CPU" else []
        },
        unproven=LAMBDA_UNSET if folder.startswith("06") else "",
        packages=TRANSFORMERS,
    )
    for folder, (gpus, flags, reference) in CHAPTERS.items()
)

PICOTRON = tuple(
    Case(
        f"picotron_{name}",
        "picotron",
        ".",
        f"torchrun --nproc_per_node 4 --master_addr localhost --master_port {port} train.py "
        f"--config picotron_{groups}.json",
        gpus=4,
        # With FLASH_ATTEN=0 it calls none of these.
        changed={
            "picotron/model.py": [
                (f"from flash_attn.{module} import {function}\n", "")
                for module, function in (
                    ("flash_attn_interface", "flash_attn_func"),
                    ("layers.rotary", "apply_rotary_emb"),
                    ("ops.triton.layer_norm", "layer_norm_fn"),
                )
            ]
        },
        data={
            "texts": "texts",
            "llama": "llama",
            "hf_model/llama": "llama",
            "wandb.py": "wandb.py",
            f"picotron_{groups}.json": f"picotron_{groups}.json",
            "hf_model_safetensors": "llama",
        },
        losses=rf"Loss: +{NUMBER}",
        translated={
            "train.py": [
                (r"torch\.cuda\.is_bf16_supported\(\)", "True"),
                (r'torch\.device\("cuda", local_rank\)', 'torch.device("cpu")'),
            ],
            "picotron/model.py": [
                (r"torch\.device\('cuda', local_rank\)", 'torch.device("cpu")'),
            ],
        },
        packages=TRANSFORMERS,
    )
    for name, groups, port in (
        ("tensor_and_pipeline", "tp", 25500),
        ("context_and_data", "cp", 25501),
    )
)

LANGUAGE = (*BUILD_NANOGPT, *LAMBDALABS, *PICOTRON)
