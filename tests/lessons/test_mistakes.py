"""A mistake on a script's command line is one sentence, without a traceback or a file."""

from pathlib import Path

import pytest
from commands import ROOT, run_script

SCRIPTS = ROOT / "scripts"
# {script: [(variables and flags, a part of the sentence)]}
MISTAKES = {
    "PT_CNN_SingleGPU": [("--workers -1", "--workers from 0 up")],
    "PT_CNN_DataParallel": [
        ("--batch-size 0", "--batch-size are from 1 up"),
        ("", "Try: multigpu virtual --gpus 2"),
    ],
    "PT_CNN_ModelParallel": [
        ("--micro-batches 0", "--micro-batches from 1 to --batch-size"),
        ("", "Try: multigpu virtual --gpus 2"),
    ],
    "PT_CNN_Pipeline": [("", "Try: torchrun --nproc-per-node 2")],
    "PT_CNN_DDPSpawn": [("--nprocs 3", "must be a multiple of --nprocs")],
    "PT_CNN_MultiGPU": [
        ("--batch-size 9 --accumulate 2", "--batch-size must be a multiple of 2"),
        ("--batch-size 0", "--batch-size must be a multiple of 1"),
        ("--resume nowhere.pt", "nowhere.pt"),
        ("--lr 1e38", "lower --lr"),
    ],
    "PT_CNN_HybridParallel": [
        ("", "Try: multigpu virtual --gpus 4 torchrun --nproc-per-node 2"),
    ],
    "TF_CNN_MultiGPU": [
        (
            "--batch-size 7 --devices 2",
            "--batch-size 7 cannot be split evenly over 2 replicas",
        ),
        ("--epochs 0", "--epochs and --batch-size are from 1 up"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", "is one process, and torchrun started 2"),
    ],
    "TF_CNN_CustomLoop": [("--lr 1e38", "lower --lr")],
    "TF_CNN_MultiNode": [("--lr 3e38", "lower --lr")],
    "PTL_multiGPU": [
        ("--devices 2 --batch-size 7", "--batch-size must be a multiple of 2"),
        ("--batch-size 0", "--batch-size are from 1 up"),
        ("--lr 3e38", "lower --lr"),
        ("--resume no.ckpt", "no.ckpt"),
    ],
    "PTL_Strategies": [
        ("--strategy dpp", "there is no strategy 'dpp'"),
        ("--strategy dp --devices 2", "multigpu virtual --gpus 2"),
    ],
    "PTL_Compressed": [("--batch-size 9 --devices 2", "a multiple of 2")],
    "PTL_Decentralized": [("--batch-size 9 --devices 2", "a multiple of 2")],
    "PTL_NodeBatch": [
        ("--batch-size 9", "--batch-size must be a multiple"),
        ("--batch-size 2000", "--batch-size at most 1437"),
    ],
    "PTL_Precision": [
        ("--precision 8", "'8'"),
        ("--devices 2 --batch-size 9", "--batch-size must be a multiple"),
        ("--epochs 0", "--epochs"),
    ],
    "PT_CNN_Elastic": [
        ("--epochs 0", "--epochs"),
        ("--kill 1:30", "--kill"),
        ("--epochs 1 --lr 1e38", "lower --lr"),
    ],
    "PT_CNN_Scaling": [("", "Try: torchrun --standalone"), ("--epochs 0", "--epochs")],
    "PT_GPT_Memory": [("--heads 5", "--hidden 48 is not a multiple of --heads 5")],
    "PT_GPT_FSDP": [
        ("--layers 0", "--layers 0: give 1 or more"),
        ("--hidden 50", "--hidden 50 is not a multiple of --heads 4"),
        ("RANK=0 WORLD_SIZE=2 --batch-size 31", "--batch-size 31 is not a multiple of the 2"),
        ("--group 2", "--group 2 does not divide the 1 ranks"),
        ("--group 0", "--group 0 does not divide"),
        ("--batch-size 2000", "1437 rows, fewer than --batch-size"),
    ],
    "PT_GPT_TensorParallel": [
        ("--heads 5", "--hidden 48 is not a multiple of --heads 5"),
        ("RANK=0 WORLD_SIZE=3", "3 ranks cannot share 4 heads"),
    ],
    "PT_GPT_Mesh": [
        ("--heads 5", "--hidden 48 is not a multiple of --heads 5"),
        ("--mesh 0 1 1 1", "--mesh has 0 ranks"),
        ("--mesh 2 1 2 2", "--mesh has 8 ranks, torchrun has started 1"),
        ("--batch-size 30", "--batch-size a multiple of 4"),
        ("--batch-size 1440", "of at most 1437"),
        ("--micro-batches 0", "--micro-batches 0: give 1 or more"),
        ("RANK=0 WORLD_SIZE=3 --mesh 1 1 1 3", "give multiples of tensor 3"),
    ],
    "PT_Clinic": [
        ("--patient flu", "invalid choice: 'flu'"),
        ("--patient order", "start the ranks with torchrun"),
        ("RANK=0 --patient order --timeout 0", "a --timeout above 0"),
    ],
    "PT_GPT_ContextExperts": [
        ("--heads 5", "--hidden 48 is not a multiple of --heads 5"),
        ("RANK=0 WORLD_SIZE=3", "3 ranks cannot share 64 tokens"),
        ("--batch-size 2000", "1437 rows, fewer than --batch-size"),
    ],
    "../lessons/19-context-experts/experts": [
        ("RANK=0 WORLD_SIZE=2 --experts 3", "--experts 3 is not a multiple of the 2 ranks"),
        ("RANK=0 WORLD_SIZE=2 --capacity 0", "--capacity is above 0"),
    ],
    "../lessons/15-fsdp/zero": [("--group 2", "run scripts/PT_GPT_FSDP.py")],
}
# Every script has these two flags. Those of the clinic, the memory and the pipeline ask for
# ranks, or for a GPU, first. A file that is not there, or one that is no .npz:
DATA = {
    True: (f"--data {__file__}", "This file contains pickled (object) data"),
    False: ("--data no.npz", "no.npz"),
}
OUT = (f"--out {__file__}/folder", "Not a directory")
FIRST = (
    "PT_Clinic",
    "TF_CNN_MultiNode",
    "PT_CNN_Scaling",
    "PT_CNN_DataParallel",
    "PT_GPT_Memory",
    "PT_CNN_Pipeline",
    "PT_CNN_Elastic",
)
ROWS = [(stem, *row) for stem, rows in MISTAKES.items() for row in rows]
ROWS += [
    (stem, *row)
    for stem in MISTAKES
    for row in (DATA[not stem.startswith("TF_")], OUT)
    if stem not in FIRST and "/" not in stem
]


def test_each_script_has_a_mistake():
    assert {path.stem for path in SCRIPTS.glob("*.py")} <= set(MISTAKES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "line", "words"), ROWS, ids=lambda value: Path(value).stem if value else ""
)
def test_a_mistake_is_one_sentence(tmp_path, stem, line, words):
    flags = line.split()
    variables = dict(flag.split("=") for flag in flags if flag[0].isupper())
    given = [flag for flag in flags if not flag[0].isupper()]
    done = run_script(SCRIPTS / f"{stem}.py", *given, cwd=tmp_path, **variables)
    assert done.returncode in (1, 2), done.stdout
    assert words in done.stdout and "Traceback" not in done.stdout, done.stdout
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("metrics.json"))
