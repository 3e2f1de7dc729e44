"""The course's own scripts are proved as any other program, as CUDA programs where they are.

`make test-prove` proves eight steps of each; `make test` has proofs of some in tests/lessons.
"""

import os
import shlex

import pytest
from commands import ROOT

from multigpu import prove

TWO = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
NODES = f"bash {ROOT}/lessons/10-strategies/two_nodes.sh"
# Lesson → (command, options). If a script's flag or default sets the number of GPUs or ranks,
# its reference sets it to one. Lesson 01's script is a reference: it has nothing parallel.
RUNS = {
    "01": (f"{TWO} PT_CNN_MultiGPU.py", {"reference": "PT_CNN_SingleGPU.py"}),
    "02": ("PT_CNN_DataParallel.py", {"gpus": 2, "reference": "--devices 1"}),
    "03": ("PT_CNN_ModelParallel.py", {"gpus": 2, "reference": "PT_CNN_SingleGPU.py"}),
    "03, pipeline": (f"{TWO} PT_CNN_Pipeline.py", {"reference": "PT_CNN_SingleGPU.py"}),
    "04": ("PT_CNN_DDPSpawn.py", {"gpus": 2}),
    "05": (f"{TWO} PT_CNN_MultiGPU.py", {}),
    "05, accumulation": (f"{TWO} PT_CNN_MultiGPU.py --accumulate 2", {}),
    "05, 16 bit": (f"{TWO} PT_CNN_MultiGPU.py --amp", {}),
    "06": (f"{TWO} PT_CNN_HybridParallel.py", {"gpus": 4}),
    "09": (f"{TWO} PTL_multiGPU.py", {"gpus": 2}),
    "09, by itself": ("PTL_multiGPU.py --devices 2", {}),
    "10": (f"{TWO} PTL_Strategies.py", {}),
    "10, by itself": ("PTL_Strategies.py --devices 2", {}),
    "10, dp": ("PTL_Strategies.py --strategy dp --devices 2", {"gpus": 2}),
    "10, pipeline": (
        "PTL_Strategies.py --strategy pipeline --devices 2",
        {"gpus": 2, "reference": "--strategy dp --devices 1"},  # it needs a GPU for each stage
    ),
    "10, spawn": ("PTL_Strategies.py --strategy ddp_spawn --devices 2", {}),
    "10, horovod": (f"{TWO} PTL_Strategies.py --strategy horovod", {}),
    "10, Bagua": (
        "PTL_Strategies.py --strategy bagua:gradient_allreduce --devices 2",
        {"gpus": 2},
    ),
    "10, ddp2": (f"{NODES} PTL_NodeBatch.py", {"reference": "PTL_NodeBatch.py --serial 2"}),
    "11, 64 bit": ("PTL_Precision.py --precision 64 --devices 2", {}),
    "11, 32 bit, dp": ("PTL_Precision.py --strategy dp --devices 2", {"gpus": 2}),
    "11, 16 bit": (f"{TWO} PTL_Precision.py --precision bf16", {}),
    "12": (f"{TWO} PT_CNN_Elastic.py", {}),
    "13": (f"{TWO} PT_CNN_Scaling.py", {}),
    "15": (f"{TWO} PT_GPT_FSDP.py", {}),
    "15, by hand": (f"{TWO} 15-fsdp/zero.py --stage 3", {}),
    "16": (f"{TWO} PT_GPT_TensorParallel.py", {}),
    "16, by hand": (f"{TWO} 16-tensor-parallel/tensor_parallel.py", {}),
    "19": (f"{TWO} PT_GPT_ContextExperts.py", {}),
    "19, by hand": (f"{TWO} 19-context-experts/experts.py", {}),
}


# TensorFlow; strategies that are not exact; one GPU, and patients; stages that FSDP divides:
# prove cannot find their parameters (tests/lessons/test_lesson17.py compares the weights).
WITHOUT_A_PROOF = {
    "TF_CNN_MultiGPU", "TF_CNN_CustomLoop", "TF_CNN_MultiNode",
    "PTL_Compressed", "PTL_Decentralized",
    "PT_GPT_Memory", "PT_Clinic", "PT_GPT_Mesh",
}  # fmt: skip


def in_scripts(command: str) -> list[str]:
    """The words of a command, scripts with their paths: those in folders are lessons'."""
    return [
        str(ROOT / ("lessons" if "/" in word else "scripts") / word)
        if word.endswith(".py")
        else word
        for word in shlex.split(command)
    ]


def test_each_script_is_proved_or_named_as_one_without_a_proof():
    commands = " ".join(
        f"{command} {more.get('reference')}" for command, more in RUNS.values()
    )
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert {stem for stem in scripts if f"{stem}.py" not in commands} == WITHOUT_A_PROOF


@pytest.mark.slow
@pytest.mark.skipif("ALL_PROOFS" not in os.environ, reason="make test-prove runs it")
@pytest.mark.parametrize("lesson", RUNS)
def test_a_lessons_script_computes_what_one_gpu_computes(
    in_forks, tmp_path, monkeypatch, lesson
):
    monkeypatch.chdir(tmp_path)
    command, options = RUNS[lesson]
    words = in_scripts(command)
    if "reference" in options:
        script = [word for word in words if word.endswith(".py")]
        reference = in_scripts(options["reference"])
        own = reference[0].startswith("--")
        options = options | {
            "reference": shlex.join([*script, *reference] if own else reference)
        }
    proof = prove.run(words, steps=8, timeout=100, **options)
    assert proof.verdict == "holds", str(proof)
    assert not list(tmp_path.iterdir()), "what a script writes goes with the proof"
