"""Examples of libraries that run a training loop: Lightning and Accelerate."""

from case import LOSS, NUMBER, TWO_RANKS, Case

FABRIC = "train_fabric.py --epochs 1 --log-interval 1 --batch-size 30"
AUTOENCODER = (
    "autoencoder.py --trainer.max_epochs 1 --trainer.devices 2 --trainer.strategy ddp "
    "--trainer.logger false --data.batch_size 32 --trainer.accelerator"
)
LIGHTNING = (
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
)

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
ACCELERATE = (
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
)

CASES = (*LIGHTNING, *ACCELERATE)
