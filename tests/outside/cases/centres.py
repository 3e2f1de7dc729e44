"""Courses of computing centres: Princeton, CSC, Harvard, NCAR, NERSC, LUMI; ml-engineering."""

from case import CIFAR, LOSS, NUMBER, TWO_RANKS, Case

DDP = (
    Case(
        "princeton_02_mnist_ddp",
        "multi_gpu_training",
        "02_pytorch_ddp",
        "{helpers}/srun.py {gpus} mnist_classify_ddp.py --epochs=1 --batch-size 30 "
        "--log-interval 1",
        data={"data": "."},
        losses=LOSS,
        translated={
            "mnist_classify_ddp.py": [
                (r"\.to\(local_rank\)", '.to("cpu")'),
                (r"ddp_model, local_rank, ", 'ddp_model, "cpu", '),
            ]
        },
    ),
    Case(
        "princeton_02_simple_ddp",
        "multi_gpu_training",
        "02_pytorch_ddp",
        "{helpers}/srun.py {gpus} simple_dpp.py",
        losses=rf"\[\[ *{NUMBER}, +{NUMBER}, +{NUMBER}\]\]",
        seeded=False,
        translated={"simple_dpp.py": [(r"\.to\(local_rank\)", '.to("cpu")')]},
    ),
    Case(
        "princeton_01_mnist",
        "multi_gpu_training",
        "01_single_gpu",
        "mnist_classify.py --epochs=1 --batch-size 60 --log-interval 1",
        gpus=1,
        data={"data": "."},
        losses=LOSS,
    ),
    Case(
        "csc_mnist_ddp",
        "pytorch-ddp-examples",
        ".",
        f"{TWO_RANKS} mnist_ddp.py --epochs=2",
        data={"data": "."},
        losses=LOSS,
    ),
    Case(
        "csc_mnist_accelerate",
        "pytorch-ddp-examples",
        ".",
        f"{TWO_RANKS} mnist_accelerate.py --epochs=2",
        data={"data": "."},
        losses=LOSS,
        translated={"mnist_accelerate.py": [(r"Accelerator\(\)", "Accelerator(cpu=True)")]},
    ),
)

FASRC = "Training/Distributed_GPU_Computing"
HARVARD = (
    Case(
        "harvard_mlp_ddp",
        "User_Codes",
        f"{FASRC}/Exercise5",
        "{helpers}/srun.py {gpus} mlp_ddp.py",
        losses=rf"(?:First|Final|Mean) local loss *: {NUMBER}",
        translated={
            "mlp_ddp.py": [
                (r"\.to\(device", '.to("cpu"'),
                (r"device_id=torch\.device\(.*\),", ""),
            ]
        },
    ),
    Case(
        "harvard_mnist_ddp",
        "User_Codes",
        f"{FASRC}/Exercise6",
        f"{TWO_RANKS} train_mnist_ddp.py --epochs 2 --max-workers 1",
        data={
            f"data/{part}_{kind}.gz": f"MNIST/raw/{file}-{kind}-idx{dimensions}-ubyte.gz"
            for part, file in (("train", "train"), ("test", "t10k"))
            for kind, dimensions in (("images", 3), ("labels", 1))
        },
        losses=rf"loss {NUMBER}",
        seeded=False,
        translated={
            "train_mnist_ddp.py": [(r"device_id=torch\.device\(.*\),", "")],
        },
    ),
)

UNET = "--num_epochs 2 --num_samples 16 --num_variables 1 --num_levels 2 --lat 32 --lon 32"
# For each script of the course: its arguments, its GPUs, what is smaller.
NCAR = {
    "01_data_parallel_ddp/multinode_ddp_basic": ("--total_epochs 2 --save_every 1", 2, []),
    "01_data_parallel_ddp/multinode_ddp_unet": (UNET, 2, [("base_dim=64", "base_dim=4")]),
    "02_fully_sharded_fsdp/multinode_fsdp_unet": (UNET, 2, [("base_dim=64", "base_dim=4")]),
    "02_fully_sharded_fsdp/resnet_fsdp_training": ("--epochs 2 --batch-size 16", 2, []),
    "03_tensor_parallel_tp/01_device_mesh_basics": ("", 4, []),
    "03_tensor_parallel_tp/02_basic_tensor_parallel": ("", 4, []),
    "03_tensor_parallel_tp/tensor_parallel_vit": (
        "--num_epochs 2 --num_samples 8 --num_variables 1 --num_levels 2 --lat 16 --lon 16 "
        "--embed_dim 32 --depth 2 --num_heads 4",
        2,
        [],
    ),
    "04_pipeline_parallel_pp/01_manual_model_split": ("", 4, []),
    "04_pipeline_parallel_pp/02_pipeline_schedules": ("", 4, [("dim = 512", "dim = 32")]),
    "06_hybrid_parallelism/01_fsdp_tp_hybrid": (
        "",
        4,
        [
            ("dim=256", "dim=64"),
            ("n_heads=16", "n_heads=4"),
            ("vocab_size=32000", "vocab_size=320"),
            ("randint(32000, (batch_size, 256)", "randint(320, (batch_size, 32)"),
            ("num_iterations = 10", "num_iterations = 3"),
        ],
    ),
}
NCAR_WITHOUT_LOSSES = {
    "01_data_parallel_ddp/multinode_ddp_basic",
    "03_tensor_parallel_tp/01_device_mesh_basics",
    "04_pipeline_parallel_pp/01_manual_model_split",
    "04_pipeline_parallel_pp/02_pipeline_schedules",
}
NCAR_ON_CPU = {
    "01_data_parallel_ddp/multinode_ddp_basic": [
        (r"torch\.cuda\.nccl\.version\(\)", "None"),
        (r"\.to\(self\.local_rank\)", '.to("cpu")'),
    ],
    "01_data_parallel_ddp/multinode_ddp_unet": [(r", output_device=LOCAL_RANK", "")],
    "02_fully_sharded_fsdp/multinode_fsdp_unet": [
        (r"device_id=LOCAL_RANK", 'device_id=torch.device("cpu")')
    ],
    "02_fully_sharded_fsdp/resnet_fsdp_training": [
        (r"device_id=local_rank", 'device_id=torch.device("cpu")'),
        (r"\.to\(local_rank\)", '.to("cpu")'),
    ],
}
HPC = (
    *(
        Case(
            f"ncar_{path.partition('/')[2]}",
            "distributed-pytorch-hpc",
            ".",
            f"torchrun --standalone --nproc_per_node={gpus} scripts/{path}.py {flags}".strip(),
            gpus=gpus,
            smaller={f"scripts/{path}.py": smaller},
            data=CIFAR,
            losses="" if path in NCAR_WITHOUT_LOSSES else rf"[Ll]oss[=:]? *{NUMBER}",
            weights="snapshot.pt" if path.endswith("ddp_basic") else "",
            seeded=False,
            translated={f"scripts/{path}.py": NCAR_ON_CPU.get(path, [])},
        )
        for path, (flags, gpus, smaller) in NCAR.items()
    ),
    *(
        Case(
            f"nersc_vit_{name}",
            "dl-at-scale-training",
            ".",
            "{helpers}/srun.py {gpus} {helpers}/ddp_vars.py train.py --config=short "
            f"--num_iters 8 --local_batch_size 2 {flags}".strip(),
            data={"data": "era5"},
            smaller={
                "config/ViT.yaml": [
                    ("'/data/", "'data/"),
                    ("expdir: '/logs'", "expdir: 'logs'"),
                    ("img_size: [360, 720]", "img_size: [16, 32]"),
                    ("embed_dim: 384", "embed_dim: 32"),
                    ("depth: 12", "depth: 2"),
                    ("num_heads: 8", "num_heads: 4"),
                    ("limit_nsamples: 512", "limit_nsamples: 16"),
                    ("limit_nsamples_val: 128", "limit_nsamples_val: 8"),
                ]
            },
            losses=rf"loss={NUMBER}",
            seeded=False,
            **more,
        )
        for name, flags, more in (
            # Dropping paths is switched off; the runner's torch.rand cannot be scripted.
            (
                "fp32",
                "",
                {
                    "translated": {
                        "train.py": [
                            (r'"cuda:%d" % local_rank', '"cpu"'),
                            (r"torch\.cuda\.nvtx\.\w+\(.*\)", "None"),
                        ],
                        "networks/helpers.py": [(r"@torch\.jit\.script\n", "")],
                    }
                },
            ),
            (
                "bf16",
                "--amp_mode bf16 --enable_fused",
                {
                    "reference": "vgpu",
                    "translated": {"train.py": [(r'"cuda:%d"', '"vgpu:%d"')]},
                },
            ),
        )
    ),
)

ML_ENGINEERING = (
    Case(
        "ml_engineering_gpu_test",
        "ml-engineering",
        "debug",
        f"{TWO_RANKS} torch-distributed-gpu-test.py",
    ),
    Case(
        "ml_engineering_all_reduce_bench",
        "ml-engineering",
        "network/benchmarks",
        f"{TWO_RANKS} all_reduce_bench.py --num_iterations 2 --num_warmup_iterations 1",
        smaller={"all_reduce_bench.py": [("upper_limit = 34", "upper_limit = 20")]},
    ),
    Case(
        "ml_engineering_latency",
        "ml-engineering",
        "network/benchmarks",
        f"{TWO_RANKS} all_reduce_latency_comp.py",
        smaller={
            "all_reduce_latency_comp.py": [
                ("N = 500000", "N = 1000"),
                ("chunks = 1000", "chunks = 10"),
            ]
        },
    ),
    Case(
        "ml_engineering_all_gather_object",
        "ml-engineering",
        "network/benchmarks",
        f"{TWO_RANKS} all_gather_object_vs_all_reduce.py",
        smaller={"all_gather_object_vs_all_reduce.py": [("number=1000", "number=10")]},
    ),
)

LUMI = {
    "copied": ".",
    "data": {"../resources/train_images.hdf5": "train_images.hdf5"},
    "losses": rf"Training Loss: {NUMBER}",
    "seeded": False,
}
LUMI_SMALLER = [
    ('weights="DEFAULT"', "image_size=32"),
    ("Resize(256)", "Resize(36)"),
    ("CenterCrop(224)", "CenterCrop(32)"),
    ("num_workers=7", "num_workers=1"),
    ("batch_size=32", "batch_size=4"),
]
GUIDES = (
    Case(
        "lumi_ddp_vit",
        "LUMI-AI-Guide",
        "05-multi-gpu-and-node",
        "torchrun --standalone --nproc_per_node=2 ddp_visiontransformer.py",
        smaller={"ddp_visiontransformer.py": [*LUMI_SMALLER, ("epochs=10", "epochs=2")]},
        translated={
            "ddp_visiontransformer.py": [(r"\.to\(local_rank\)", '.to("cpu")')],
        },
        **LUMI,
    ),
    Case(
        "lumi_vit",
        "LUMI-AI-Guide",
        "01-quickstart",
        "visiontransformer.py",
        gpus=1,
        smaller={"visiontransformer.py": [*LUMI_SMALLER, ("EPOCHS = 4", "EPOCHS = 2")]},
        **LUMI,
    ),
)


CASES = (*DDP, *HARVARD, *HPC, *GUIDES, *ML_ENGINEERING)
