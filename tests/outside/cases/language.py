"""Language models: Karpathy's, LLMs-from-scratch, LambdaLabs' guide, picotron."""

from case import NUMBER, ON_GPU, TWO_RANKS, Case

# dropout and weight_decay are flags of the script; the data set is the one of its README.
NANO_SIZE = (
    "config/train_shakespeare_char.py --compile=False --max_iters=20 --eval_interval=10 "
    "--eval_iters=2 --log_interval=1 --block_size=32 --batch_size=8 --n_layer=2 --n_head=2 "
    "--n_embd=32 --lr_decay_iters=20"
)
NANO_LOSS = rf"loss {NUMBER}"
NANO = {
    "data": {"data/shakespeare_char": "shakespeare_char"},
    "losses": NANO_LOSS,
}
# get_batch and autocast ask for the name of the device's type.
NANO_ON_CPU = [
    (r"f'cuda:\{ddp_local_rank\}'", "'cpu'"),
    (r"device_type = 'cuda' if 'cuda' in device else 'cpu'", "device_type = 'cpu'"),
]
NANOGPT = tuple(
    Case(
        f"nanoGPT_{name}",
        "nanoGPT",
        ".",
        f"{start} {NANO_SIZE} --dtype={dtype} --gradient_accumulation_steps={gpus}",
        gpus=gpus,
        # The CPU's autocast keeps other operations in float32 than CUDA's.
        reference="CPU" if dtype == "float32" else "vgpu",
        translated={"train.py": NANO_ON_CPU} if dtype == "float32" else {},
        **NANO,
    )
    for dtype in ("float32", "float16", "bfloat16")
    for name, start, gpus in (
        (dtype, "train.py", 1),
        (f"ddp_{dtype}", f"{TWO_RANKS} train.py", 2),
    )
)
LLAMA2C = (
    "train.py --compile=False --dtype=float32 --vocab_source=custom --vocab_size=64 "
    "--max_seq_len=16 --batch_size=4 --dim=32 --n_layers=2 --n_heads=4 --n_kv_heads=2 "
    "--max_iters=10 --eval_interval=5 --eval_iters=2 --warmup_iters=2 "
    "--gradient_accumulation_steps=2"
)
KARPATHY = (
    Case(
        "minGPT_adder",
        "minGPT",
        ".",
        "projects/adder/adder.py --trainer.max_iters=12 --trainer.num_workers=1 "
        "--trainer.batch_size=16",
        gpus=1,
        losses=rf"train loss {NUMBER}",
        python_path=".",
    ),
    *(
        Case(
            f"makemore_{model}",
            "makemore",
            ".",
            f"{start} --device cuda",
            gpus=1,
            reference_command=f"{start} --device cpu",
            losses=NANO_LOSS,
        )
        for model in ("mlp", "gru")
        for start in [f"makemore.py --type {model} --max-steps 41 --num-workers 1"]
    ),
    *(
        Case(
            f"llama2.c_{name}",
            "llama2.c",
            ".",
            f"{start} {LLAMA2C}",
            gpus=gpus,
            data={"data/tok64": "tok64"},
            losses=rf"loss {NUMBER}",
        )
        for name, start, gpus in (("one_gpu", "", 1), ("ddp", TWO_RANKS, 2))
    ),
)

RASBT = "appendix-A/01_main-chapter-code"
RASBT_ON_CPU = [(r"\.to\((rank|device)\)", '.to("cpu")')]
# Two ranks print at the same time: what follows can be another rank's digit.
TWO_DIGITS = r"Loss: (\d\.\d\d)"
FROM_SCRATCH = (
    Case(
        "llms_from_scratch_ddp_spawn",
        "LLMs-from-scratch",
        RASBT,
        "DDP-script.py",
        losses=TWO_DIGITS,
        # It seeds the parent process, but not the ranks that it starts.
        seeded=False,
        translated={"DDP-script.py": RASBT_ON_CPU},
    ),
    Case(
        "llms_from_scratch_ddp_torchrun",
        "LLMs-from-scratch",
        RASBT,
        f"{TWO_RANKS} DDP-script-torchrun.py",
        losses=TWO_DIGITS,
        translated={"DDP-script-torchrun.py": RASBT_ON_CPU},
    ),
)

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


CASES = (*NANOGPT, *KARPATHY, *FROM_SCRATCH, *BUILD_NANOGPT, *LAMBDALABS, *PICOTRON)
