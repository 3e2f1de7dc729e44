"""PiPPy: a pipeline over three GPUs. Its other examples trace a model for torch 2.2."""

from case import Case

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
