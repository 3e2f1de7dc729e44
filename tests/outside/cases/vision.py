"""Vision: DDP on one page by several authors, timm, DINO, MAE."""

from case import CIFAR, METER, NUMBER, TWO_RANKS, Case

# torch.distributed.launch of torch 1: it passes --local_rank.
TORCH1 = "{helpers}/torch1.py {gpus}"
SMALL_IMAGES = [
    ("RandomResizedCrop(224)", "RandomResizedCrop(64)"),
    ("Resize(256", "Resize(72"),
    ("CenterCrop(224)", "CenterCrop(64)"),
]
# Since torch 1.7, eq keeps the strides of its transposed input.
STRIDES = [("correct[:k].view(-1)", "correct[:k].reshape(-1)")]
TCZHANGZHI = "--data images --epochs 1 -b 8 -p 1 --seed 1 --lr 0.01"
TCZHANGZHI_STARTS = {
    "dataparallel": "dataparallel.py",
    "distributed": f"{TORCH1} distributed.py",
    "multiprocessing_distributed": "multiprocessing_distributed.py",
    # Its world size is the number of tasks, so a task can have one GPU.
    "distributed_slurm_main": "{helpers}/srun.py 1 distributed_slurm_main.py --dist-file file",
}
ONE_PAGE = tuple(
    Case(
        f"tczhangzhi_{name}",
        "pytorch-distributed",
        ".",
        f"{start} {TCZHANGZHI}",
        gpus={"dataparallel": 4, "distributed_slurm_main": 1}.get(name, 2),
        smaller={f"{name}.py": SMALL_IMAGES},
        changed={f"{name}.py": STRIDES},
        data={"images": "images"},
        losses=METER,
        # --seed seeds the parent process, but not the ranks that it starts.
        seeded=name in ("dataparallel", "distributed"),
    )
    for name, start in TCZHANGZHI_STARTS.items()
)

# At 0.01 BatchNorm over few images makes a difference in rounding 20 times as large in a step:
# on one machine the fourth loss differed from that in float64 by 3e-5 in both runs.
RENTAINHE = "--epochs 1 --batch_size 8 --lr 0.001"
# On this machine; the number of a port for each script, because a port is free late.
RENTAINHE_DDP = f"{RENTAINHE} --ip 127.0.0.1 --port"
RENTAINHE_STARTS = {
    "dataparallel": f"dataparallel.py --gpu 0,1 {RENTAINHE}",
    "distributed": f"{TORCH1} distributed.py {RENTAINHE_DDP} 29611",
    "distributed_mp": f"distributed_mp.py {RENTAINHE_DDP} 29612",
    "distributed_gradient_accumulation": "distributed_gradient_accumulation.py "
    f"{RENTAINHE_DDP} 29613 --grad_accu_steps 2",
}
ONE_PAGE += tuple(
    Case(
        f"rentainhe_{name}",
        "pytorch-distributed-training",
        ".",
        start,
        smaller={
            f"{name}.py": [("num_workers=4", "num_workers=0")],
            "utils/model.py": [
                ("[2,2,2,2]", "[1,1,1,1]"),
                ("(block, 128,", "(block, 64,"),
                ("(block, 256,", "(block, 64,"),
                ("(block, 512,", "(block, 64,"),
                ("nn.Linear(512*", "nn.Linear(64*"),
            ],
        },
        data={"data/cifar-100-python": "cifar-100-python"},
        losses=rf"(?:Loss:|Loss) +{NUMBER}",
        seeded=name == "distributed_mp",
        # There is no SyncBatchNorm on the CPU.
        translated={
            f"{name}.py": [
                (
                    r"torch\.nn\.SyncBatchNorm\.convert_sync_batchnorm\((\w+)\)",
                    '__import__("as_gpus").sync_batchnorm(\\1)',
                ),
                (r"\.to\(local_rank\)", '.to("cpu")'),
            ]
        }
        if name != "dataparallel"
        else {},
    )
    for name, start in RENTAINHE_STARTS.items()
)

ONE_PAGE += (
    *(
        Case(
            f"jia-zhuang_{name}",
            "pytorch-multi-gpu-training",
            ".",
            f"{name}.py",
            # They choose GPUs 2 and 3 by CUDA_VISIBLE_DEVICES.
            gpus=4,
            smaller={f"{name}.py": [("i % 10 ==", "i % 1 ==")]},
            data={"data": "."},
            scalars="runs/*/events*",
            seeded=False,
            translated={f"{name}.py": on_cpu},
        )
        for name, on_cpu in (
            ("single_gpu_train", []),
            (
                "data_parallel_train",
                [
                    (
                        r"model\(inputs, labels=labels\)",
                        '__import__("as_gpus").data_parallel_with('
                        "model.module, 2, inputs, labels)",
                    )
                ],
            ),
        )
    ),
    Case(
        "yangkky_mnist",
        "distributed_tutorial",
        "src",
        "mnist.py",
        gpus=1,
        smaller={"mnist.py": [("% 100 == 0", "% 2 == 0")]},
        # It calls neither.
        changed={
            "mnist.py": [
                ("from apex.parallel import DistributedDataParallel as DDP\n", ""),
                ("from apex import amp\n", ""),
            ]
        },
        data={"data": "."},
        losses=rf"Loss: {NUMBER}",
        seeded=False,
    ),
)


DINO = (
    "--arch vit_tiny --epochs 2 --batch_size_per_gpu 4 --num_workers 1 --output_dir . "
    "--data_path images"
)
DINO_SMALLER = [
    ("RandomResizedCrop(224", "RandomResizedCrop(64"),
    ("RandomResizedCrop(96", "RandomResizedCrop(32"),
]
MAE = (
    "main_pretrain.py --data_path images --batch_size 4 --epochs 2 --warmup_epochs 1 "
    "--num_workers 1 --model mae_vit_base_patch16 --input_size 64 --norm_pix_loss"
)
SELF_SUPERVISED = (
    *(
        Case(
            f"dino_{name}",
            "dino",
            ".",
            "torchrun --standalone --nproc_per_node=2 main_dino.py "
            f"{DINO}/train --out_dim 64 --local_crops_number 2 --warmup_epochs 0 {flags}",
            smaller={"main_dino.py": DINO_SMALLER},
            data={"images": "images", "torch_home/hub": "torch_hub"},
            losses=rf"loss: {NUMBER} \({NUMBER}\)",
            reference=reference,
        )
        for name, flags, reference in (
            ("fp32", "--use_fp16 false", "CPU"),
            ("fp16", "--use_fp16 true", "vgpu"),
        )
    ),
    Case(
        "dino_eval_linear",
        "dino",
        ".",
        f"torchrun --standalone --nproc_per_node=2 eval_linear.py {DINO} --num_labels 2",
        smaller={"eval_linear.py": SMALL_IMAGES},
        data={"images": "images", "torch_home/hub": "torch_hub"},
        losses=rf"loss: {NUMBER} \({NUMBER}\)",
        # The backbone's weights are random: there is none of this size to download.
        seeded=False,
    ),
    Case(
        "mae_pretrain",
        "mae",
        ".",
        f"torchrun --standalone --nproc_per_node=2 {MAE}",
        smaller={
            "models_mae.py": [
                ("img_size=224", "img_size=64"),
                ("embed_dim=768, depth=12", "embed_dim=96, depth=2"),
                ("embed_dim=512, decoder_depth=8", "embed_dim=64, decoder_depth=1"),
            ]
        },
        changed={"util/pos_embed.py": [("dtype=np.float)", "dtype=float)")]},
        data={"images": "images"},
        losses=rf"loss: {NUMBER} \({NUMBER}\)",
        # torch.cuda.amp.autocast() is float16.
        reference="vgpu",
        packages="timm==0.3.2",
    ),
)


OTHERS = (
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

CASES = (*ONE_PAGE, *SELF_SUPERVISED, *OTHERS)
