"""Print the launcher's variables that each rank of Trainer(devices=3) finds.

python lessons/09-lightning/variables.py | sort
"""

import os

import multigpu.trainer as L

NAMES = ("MASTER_ADDR", "WORLD_SIZE", "NODE_RANK", "RANK", "LOCAL_RANK")


def print_variables() -> None:
    line = " ".join(f"{name}={os.environ.get(name)}" for name in NAMES)
    os.write(1, f"{line}\n".encode())  # one system call, because three processes write


if __name__ == "__main__":
    trainer = L.Trainer(accelerator="cpu", devices=3, strategy="ddp", logger=False)
    trainer.strategy.launch(print_variables)
