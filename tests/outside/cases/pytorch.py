"""PyTorch's own: tutorials, examples, and PiPPy's pipeline with stages written by hand.

PiPPy's other examples trace a model for torch 2.2.
"""

from case import FOUR_RANKS, LOSS, METER, NUMBER, ON_GPU, TWO_RANKS, Case

MNIST = {"../data": "."}
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
HOGWILD = "main.py --num-processes 1 --epochs 1 --log-interval 1 --batch-size 60"
DISTRIBUTED = (
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

OTHER_EXAMPLES = (
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

PIPPY = (
    Case(
        "pippy_example_manual_stage",
        "PiPPy",
        "examples/basic",
        "torchrun --standalone --nproc-per-node 3 example_manual_stage.py",
        gpus=3,
        copied=".",
        python_path="../..",
    ),
)

CASES = (*TUTORIALS, *DDP_SERIES, *DISTRIBUTED, *OTHER_EXAMPLES, *PIPPY)
