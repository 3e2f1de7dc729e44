"""The scripts, with the literals that make each one smaller."""

from case import NUMBER, ON_GPU, Case
from cases_copied import COPIED
from cases_language import LANGUAGE
from cases_pipeline import PIPPY

MNIST = {"../data": "."}
LOSS = rf"[Ll]oss:? {NUMBER}"
TUTORIALS = (
    Case(
        "model_parallel_tutorial",
        "tutorials",
        "intermediate_source",
        "model_parallel_tutorial.py",
        smaller={
            "model_parallel_tutorial.py": [
                ("num_batches = 3", "num_batches = 1"),
                ("batch_size = 120", "batch_size = 8"),
                ("image_w = 128", "image_w = 64"),
                ("image_h = 128", "image_h = 64"),
                ("num_repeat = 10", "num_repeat = 1"),
                ("split_size=20", "split_size=4"),
                ("[1, 3, 5, 8, 10, 12, 20, 40, 60]", "[2, 4]"),
            ]
        },
    ),
    Case(
        "data_parallel_tutorial",
        "tutorials",
        "beginner_source/blitz",
        "data_parallel_tutorial.py",
    ),
    Case(
        "amp_recipe",
        "tutorials",
        "recipes_source/recipes",
        "amp_recipe.py",
        gpus=1,
        smaller={
            "amp_recipe.py": [
                ("batch_size = 512", "batch_size = 16"),
                ("in_size = 4096", "in_size = 64"),
                ("out_size = 4096", "out_size = 64"),
                ("num_batches = 50", "num_batches = 4"),
            ]
        },
    ),
)

SERIES = "distributed/ddp-tutorial-series"
DDP_SERIES = (
    Case(
        "ddp_series_single_gpu",
        "examples",
        SERIES,
        "single_gpu.py 2 1",
        gpus=1,
        weights="checkpoint.pt",
        seeded=False,
        translated={"single_gpu.py": [(r"device = 0", 'device = "cpu"')]},
    ),
    Case(
        "ddp_series_multigpu",
        "examples",
        SERIES,
        "multigpu.py 2 1",
        weights="checkpoint.pt",
        seeded=False,
        translated={"multigpu.py": [(r"\.to\((self\.)?gpu_id\)", '.to("cpu")')]},
    ),
    Case(
        "ddp_series_multigpu_torchrun",
        "examples",
        SERIES,
        "torchrun --standalone --nproc_per_node=2 multigpu_torchrun.py 2 1",
        weights="snapshot.pt",
        seeded=False,
        translated={"multigpu_torchrun.py": [(r"\.to\((self\.)?gpu_id\)", '.to("cpu")')]},
    ),
    Case(
        "ddp_series_multinode",
        "examples",
        SERIES,
        "torchrun --nnodes=1 --nproc_per_node=2 --rdzv_backend=c10d "
        "--rdzv_endpoint=localhost:0 multinode.py 2 1",
        weights="snapshot.pt",
        seeded=False,
        translated={"multinode.py": [(r"\.to\((self\.)?local_rank\)", '.to("cpu")')]},
    ),
)

IMAGENET = [
    ("1281167", "8"),
    ("50000", "4"),
    ("(3, 224, 224)", "(3, 64, 64)"),
]
METER = rf"Loss {NUMBER} \({NUMBER}\)"
TWO_RANKS = "torchrun --standalone --nproc_per_node=2"
FOUR_RANKS = "torchrun --standalone --nproc_per_node=4"
HOGWILD = "main.py --num-processes 1 --epochs 1 --log-interval 1 --batch-size 60"
EXAMPLES = (
    Case(
        "mnist",
        "examples",
        "mnist",
        "main.py --epochs 1 --log-interval 1 --batch-size 60",
        data=MNIST,
        losses=LOSS,
    ),
    Case(
        "imagenet_dummy_data_parallel",
        "examples",
        "imagenet",
        "main.py --dummy --epochs 1 -b 4 -j 1 -p 1 --seed 1 --lr 0.01",
        smaller={"main.py": IMAGENET},
        losses=METER,
        translated={
            "main.py": [
                (r"elif device\.type == 'cuda'", "elif True"),
                (
                    r"torch\.nn\.DataParallel\(model\)\.cuda\(\)",
                    "torch.nn.DataParallel(model)",
                ),
                (r"if not use_accel", "if False"),
            ]
        },
    ),
    Case(
        "imagenet_dummy_spawn_ddp",
        "examples",
        "imagenet",
        "main.py --dummy --epochs 1 -b 4 -j 1 -p 1 --seed 1 --lr 0.01 "
        "--multiprocessing-distributed --world-size 1 --rank 0 "
        "--dist-url tcp://127.0.0.1:29534",
        smaller={"main.py": IMAGENET},
        losses=METER,
        # --seed seeds the parent process, but not the ranks that it starts.
        seeded=False,
        translated={
            "main.py": [
                (r"device\.type ?== ?'cuda'", "True"),
                (r"default='nccl'", "default='gloo'"),
            ]
        },
    ),
    Case(
        "imagenet_folder_data_parallel",
        "examples",
        "imagenet",
        "main.py images --epochs 2 -b 6 -j 1 -p 1 --seed 1 --lr 0.01 -a mobilenet_v3_small",
        smaller={
            "main.py": [
                ("RandomResizedCrop(224)", "RandomResizedCrop(64)"),
                ("Resize(256)", "Resize(72)"),
                ("CenterCrop(224)", "CenterCrop(64)"),
                ("topk=(1, 5)", "topk=(1, 2)"),
            ]
        },
        data={"images": "images"},
        unproven="dropout on two GPUs draws from two generators",
        losses=METER,
    ),
    Case(
        "ddp_example",
        "examples",
        "distributed/ddp",
        f"{TWO_RANKS} example.py",
    ),
    Case(
        "tensor_parallel",
        "examples",
        "distributed/tensor_parallelism",
        f"{TWO_RANKS} tensor_parallel_example.py",
    ),
    Case(
        "sequence_parallel",
        "examples",
        "distributed/tensor_parallelism",
        f"{TWO_RANKS} sequence_parallel_example.py",
    ),
    Case(
        "fsdp_tp",
        "examples",
        "distributed/tensor_parallelism",
        f"{FOUR_RANKS} fsdp_tp_example.py",
        gpus=4,
        smaller={
            "fsdp_tp_example.py": [
                ("dim=256", "dim=64"),
                ("n_heads=16", "n_heads=4"),
                ("vocab_size=32000", "vocab_size=320"),
                ("randint(32000, (8, 256)", "randint(320, (4, 32)"),
                ("num_iterations = 10", "num_iterations = 3"),
            ]
        },
    ),
    *(
        Case(
            f"FSDP2{name}",
            "examples",
            "distributed/FSDP2",
            f"{TWO_RANKS} example.py {flags}".strip(),
            smaller={
                "example.py": [
                    ("vocab_size = 1024", "vocab_size = 64"),
                    ("batch_size = 32", "batch_size = 4"),
                    ("seq_len = 64", "seq_len = 16"),
                    ("n_layers=10", "n_layers=4"),
                    ("range(10)", "range(3)"),
                ]
            },
            unproven="it trains layers that to_empty has left without numbers",
        )
        for name, flags in (
            ("", ""),
            ("_prefetch", "--explicit-prefetching"),
            ("_mixed_precision", "--mixed-precision"),
            ("_dcp_api", "--dcp-api"),
        )
    ),
    Case(
        "minGPT-ddp",
        "examples",
        "distributed/minGPT-ddp/mingpt",
        f"{TWO_RANKS} main.py",
        smaller={
            "gpt2_train_cfg.yaml": [
                (
                    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                    "tinyshakespeare/input.txt",
                    "data/input.txt",
                ),
                ("block_size: 128", "block_size: 16"),
                ("truncate: 0.05", "truncate: 0.001"),
                ("n_layer: 8", "n_layer: 2"),
                ("n_head: 8", "n_head: 2"),
                ("n_embd: 512", "n_embd: 32"),
                ("max_epochs: 10", "max_epochs: 3"),
                ("batch_size: 216", "batch_size: 32"),
                ("data_loader_workers: 4", "data_loader_workers: 1"),
            ],
            "trainer.py": [("iter % 100", "iter % 1")],
        },
        losses=LOSS,
        seeded=False,
        # use_amp is float16.
        reference="vgpu",
    ),
)

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

COURSES = (
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

RASBT = "appendix-A/01_main-chapter-code"
FASRC = "Training/Distributed_GPU_Computing"
# Two ranks print at the same time: what follows can be another rank's digit.
TWO_DIGITS = r"Loss: (\d\.\d\d)"
RASBT_ON_CPU = [(r"\.to\((rank|device)\)", '.to("cpu")')]
MORE_COURSES = (
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

FABRIC = "train_fabric.py --epochs 1 --log-interval 1 --batch-size 30"
AUTOENCODER = (
    "autoencoder.py --trainer.max_epochs 1 --trainer.devices 2 --trainer.strategy ddp "
    "--trainer.logger false --data.batch_size 32 --trainer.accelerator"
)
NOBODYS_LIST = (
    Case(
        "dcgan",
        "examples",
        "dcgan",
        "main.py --accel --dataset fake --niter 1 --manualSeed 1 --batchSize 8 --imageSize 64 "
        "--ngf 8 --ndf 8 --nz 10 --ngpu 2 --workers 1 --dry-run",
        losses=rf"Loss_D: {NUMBER} Loss_G: {NUMBER}",
        translated={
            "main.py": [
                (r"(net[GD])\.apply\((weights_init)\)", rf"{ON_GPU}(\1.apply)(\2)"),
                (
                    r"nn\.parallel\.data_parallel\((.*), range\((.*)\)\)",
                    r'__import__("as_gpus").data_parallel(\1, \2)',
                ),
                (r"input\.is_cuda or input\.is_xpu", "True"),
            ]
        },
    ),
    Case(
        "vae",
        "examples",
        "vae",
        "main.py --epochs 2 --batch-size 50 --log-interval 2",
        gpus=1,
        data={"../data": "."},
        losses=LOSS,
    ),
    *(
        Case(
            f"word_language_model_{model.lower()}",
            "examples",
            "word_language_model",
            f"main.py --accel --epochs 2 --model {model} --emsize 16 --nhid 16 --bptt 16 "
            "--log-interval 2 --batch_size 10 --lr 2",
            gpus=1,
            data={"data/wikitext-2": "wikitext-2"},
            losses=rf"(?:loss|ppl) +{NUMBER}",
            **proof,
        )
        for model, proof in (("LSTM", {}), ("GRU", {}), ("Transformer", {}))
    ),
    Case(
        "super_resolution",
        "examples",
        "super_resolution",
        "main.py --accel --upscale_factor 3 --batchSize 4 --testBatchSize 4 --nEpochs 2 "
        "--threads 1",
        gpus=1,
        smaller={
            "data.py": [("calculate_valid_crop_size(256", "calculate_valid_crop_size(96")]
        },
        data={"dataset/BSDS300": "BSDS300"},
        losses=rf"(?:Loss|PSNR): {NUMBER}",
    ),
    Case(
        "siamese_network",
        "examples",
        "siamese_network",
        "main.py --epochs 1 --batch-size 60 --log-interval 1 --dry-run",
        gpus=1,
        data={"../data": "."},
        losses=LOSS,
    ),
    Case(
        "mnist_rnn",
        "examples",
        "mnist_rnn",
        "main.py --accel --epochs 1 --log-interval 1",
        gpus=1,
        data={"../data": "."},
        losses=LOSS,
    ),
    Case(
        "mnist_hogwild",
        "examples",
        "mnist_hogwild",
        "main.py --cuda --epochs 1",
        gpus=1,
        data={"../data": "."},
        losses=LOSS,
        unproven="its processes share weights without a lock: no two runs are equal",
    ),
    Case(
        # The average loss is that of the weights that the other process has trained.
        "mnist_hogwild_one_process",
        "examples",
        "mnist_hogwild",
        f"{HOGWILD} --cuda",
        gpus=1,
        data={"../data": "."},
        losses=rf"(?:Loss|Average loss): {NUMBER}",
        reference_command=HOGWILD,
    ),
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
    Case(
        "lightning_fabric_ddp",
        "lightning",
        "examples/fabric/image_classifier",
        f"fabric run --accelerator cuda --devices 2 --strategy ddp {FABRIC}",
        reference_command=f"fabric run --accelerator cpu --devices 2 --strategy ddp {FABRIC}",
        data={"../../../Datasets": "."},
        losses=LOSS,
    ),
    Case(
        "lightning_fabric_fsdp2_tp",
        "lightning",
        "examples/fabric/tensor_parallel",
        "train.py",
        gpus=4,
        smaller={
            "train.py": [
                ("ModelArgs(vocab_size=32000)", "ModelArgs(64, 2, 4, vocab_size=320)"),
                ("seq_length=128", "seq_length=16"),
            ],
            "data.py": [("return 128", "return 32")],
        },
    ),
    Case(
        "lightning_autoencoder_ddp",
        "lightning",
        "examples/pytorch/basics",
        f"{AUTOENCODER} gpu",
        reference_command=f"{AUTOENCODER} cpu",
        smaller={"autoencoder.py": [("[55000, 5000]", "[480, 120]")]},
        losses=rf"test_loss(?:_step|_epoch)? +\S +{NUMBER}",
        data={"../../Datasets": ".", "data": "."},
    ),
    Case(
        "timm_train_ddp",
        "timm",
        ".",
        f"{TWO_RANKS} train.py images --model resnet18 --num-classes 2 --img-size 64 -b 4 "
        "--epochs 1 --workers 1 --log-interval 1 --opt sgd --lr 0.01 --sched step "
        "--warmup-epochs 0 --pin-mem",
        data={"images": "images"},
        losses=rf"Loss: +{NUMBER}",
        # Streams and pinned memory are for GPUs alone.
        translated={
            "timm/data/loader.py": [(r"self\.is_cuda = .*", "self.is_cuda = False")],
        },
    ),
)

LLAMA2C = (
    "train.py --compile=False --dtype=float32 --vocab_source=custom --vocab_size=64 "
    "--max_seq_len=16 --batch_size=4 --dim=32 --n_layers=2 --n_heads=4 --n_kv_heads=2 "
    "--max_iters=10 --eval_interval=5 --eval_iters=2 --warmup_iters=2 "
    "--gradient_accumulation_steps=2"
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
SMALLER_CV = [
    ("pretrained=True", "pretrained=False"),
    ("resnet50d", "resnet18d"),
    ("num_workers=4", "num_workers=1"),
    ('"batch_size": 64, "image_size": 224', '"batch_size": 4, "image_size": 64'),
]
COMPLETE_CV = (
    f"{TWO_RANKS} complete_cv_example.py --data_dir pets --checkpointing_steps epoch "
    "--output_dir out"
)
CIFAR = {"data/cifar-10-batches-py": "cifar-10-batches-py"}
MORE = (
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
    Case(
        "ai_summer_ddp",
        "pytorch-ddp",
        ".",
        f"{TWO_RANKS} train_ddp.py",
        data=CIFAR,
        smaller={
            "train_ddp.py": [
                ("resnet50(False)", "resnet18(False)"),
                ("batch_size = 256", "batch_size = 32"),
                ("num_workers=16", "num_workers=1"),
            ]
        },
        unproven="SyncBatchNorm takes modules on GPUs alone",
        seeded=False,
    ),
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
    Case(
        "accelerate_cv",
        "accelerate",
        "examples",
        f"{TWO_RANKS} cv_example.py --data_dir pets",
        reference_command=f"{TWO_RANKS} cv_example.py --data_dir pets --cpu",
        data={"pets": "pets"},
        smaller={"cv_example.py": SMALLER_CV},
        losses=rf"epoch \d+: {NUMBER}",
    ),
    Case(
        "accelerate_complete_cv",
        "accelerate",
        "examples",
        COMPLETE_CV,
        reference_command=f"{COMPLETE_CV} --cpu",
        data={"pets": "pets"},
        smaller={"complete_cv_example.py": SMALLER_CV},
        losses=rf"epoch \d+: {NUMBER}",
    ),
    Case(
        "mnist_forward_forward",
        "examples",
        "mnist_forward_forward",
        "main.py --epochs 2 --train_size 60 --test_size 20 --save_model",
        gpus=1,
        data={"data": "."},
        losses=rf"(?:Loss|error): +{NUMBER}",
        seeded=False,
    ),
)

CASES = (
    *TUTORIALS,
    *DDP_SERIES,
    *EXAMPLES,
    *NANOGPT,
    *COURSES,
    *MORE_COURSES,
    *NOBODYS_LIST,
    *MORE,
    *COPIED,
    *LANGUAGE,
    *PIPPY,
)
