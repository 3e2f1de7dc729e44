"""What does each rank of Trainer(devices=3) find in its environment? python lessons/09-lightning/variables.py | sort"""

import os

import multigpu.trainer as L

NAMES = ("MASTER_ADDR", "WORLD_SIZE", "NODE_RANK", "RANK", "LOCAL_RANK")


def tell() -> None:
    line = " ".join(f"{name}={os.environ.get(name)}" for name in NAMES)
    os.write(1, f"{line}\n".encode())  # at one go: three processes write


if __name__ == "__main__":
    L.Trainer(accelerator="cpu", devices=3, strategy="ddp", logger=False).strategy.launch(tell)
