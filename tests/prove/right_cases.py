"""Right programs: with one rank and with several they compute the same. See right/."""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("right")
TWO = "torchrun --standalone --nproc-per-node=2"
FOUR = "torchrun --standalone --nproc-per-node=4"


@dataclass(frozen=True)
class Right:
    """A right program, on which `multigpu prove` says "holds".

    name       the case's name
    command    what follows `multigpu prove`, started in FOLDER
    reference  the command with one rank, where it cannot be made from `command` by
               --nproc-per-node=1 or by showing one GPU
    against    the number of ranks of the reference, if it is not one
    gpus       the number of GPUs that the program sees, where `command` does not say it
    no_dropout whether the proof switches dropout off
    needs      "virtual": the program runs on GPUs alone; "hf": it imports accelerate or
               transformers; "hf virtual": both
    """

    name: str
    command: str
    reference: str | None = None
    against: int | None = None
    gpus: int | None = None
    no_dropout: bool = False
    needs: str | None = None


ONE_PROCESS = (
    Right("data_parallel", "python data_parallel.py", gpus=2, needs="virtual"),
    # The reference is the same program, in which cuda:1 is another name of cuda:0.
    Right("two_gpus", "python two_gpus.py", gpus=2, needs="virtual"),
)

DDP = (
    Right("spawn", "python spawn.py", gpus=2, needs="virtual"),
    Right("spawn_2", "python spawn.py 2", reference="python spawn.py 1"),
    Right("ddp", f"{TWO} ddp_static.py"),
    Right("ddp_static", f"{TWO} ddp_static.py --static-graph --bucket-view"),
    Right("ddp_unused", f"{TWO} ddp_static.py --find-unused"),
    Right("ddp_hook", f"{TWO} ddp_static.py --hook allreduce"),
    # Gradients travel in bfloat16, also with one rank. gloo has no such hook.
    Right("ddp_bf16_hook", f"{TWO} ddp_static.py --hook bf16_compress", needs="virtual"),
    Right("accumulation", f"{TWO} accumulation.py"),
    Right("augmented", f"{TWO} augmented.py", no_dropout=True),
    Right("by_hand", f"{TWO} by_hand.py"),
    Right("tokens", f"{TWO} tokens.py"),
    Right("contrastive", f"{TWO} contrastive.py"),
    Right("sync_batch_norm", f"{TWO} sync_batch_norm.py", needs="virtual"),
    Right("zero_redundancy", f"{TWO} zero_redundancy.py"),
    Right("zero_by_hand", f"{TWO} zero_by_hand.py"),
    Right("optimizer_reduces", f"{TWO} optimizer_reduces.py"),
    Right("optimizer_reduces_in_hooks", f"{TWO} optimizer_reduces.py --hooks"),
    Right("contrast_queue", f"{TWO} contrast_queue.py"),
    Right("amp_fp16", f"{TWO} amp_fp16.py"),
    Right("amp_bf16", f"{TWO} amp_bf16.py"),
    Right("gan", f"{TWO} gan.py"),
    Right("lbfgs", f"{TWO} lbfgs.py"),
    Right("compile_ddp", f"{TWO} compile_ddp.py"),
    Right("compile_inside", f"{TWO} compile_ddp.py --inside --backend eager"),
)

SHARDED = (
    Right("fsdp1", f"{TWO} fsdp1.py"),
    Right("fsdp1_wrap", f"{TWO} fsdp1.py --wrap-blocks"),
    Right("fsdp1_orig", f"{TWO} fsdp1.py --use-orig-params"),
    Right("fsdp1_wrap_orig", f"{TWO} fsdp1.py --wrap-blocks --use-orig-params"),
    Right("fsdp2", f"{TWO} fsdp2.py"),
    Right("fsdp2_bf16", f"{TWO} fsdp2.py --bf16"),
    Right("fsdp2_accumulate", f"{TWO} fsdp2.py --accumulate 2"),
    Right("fsdp2_hybrid", f"{FOUR} fsdp2.py --hybrid"),
    Right("tensor_parallel", f"{TWO} tensor_parallel.py"),
    Right("sequence_parallel", f"{TWO} sequence_parallel.py"),
    Right("two_d_tp", f"{TWO} two_d.py"),
    Right("two_d", f"{FOUR} two_d.py"),
    Right("two_d_against_2", f"{FOUR} two_d.py", against=2),
    Right("pipeline", f"{TWO} pipeline.py"),
    Right("pipeline_1f1b", f"{TWO} pipeline.py --schedule 1f1b"),
    Right("pipeline_4", f"{FOUR} pipeline.py"),
    Right("pipeline_sharded", f"{FOUR} pipeline_sharded.py", against=2),
)

LIBRARIES = (
    Right(
        "lightning_devices",
        "python lightning_ddp.py --devices 2",
        reference="python lightning_ddp.py --devices 1",
    ),
    Right("lightning_gpus", "python lightning_ddp.py", gpus=2, needs="virtual"),
    Right("lightning_torchrun", f"{TWO} lightning_ddp.py"),
    Right("lightning_accumulate", f"{TWO} lightning_ddp.py --accumulate 2"),
    Right("fabric", f"{TWO} fabric.py"),
    Right(
        "course_devices",
        "python course_trainer.py --devices 2",
        reference="python course_trainer.py --devices 1",
    ),
    Right("course_gpus", "python course_trainer.py --devices -1", gpus=2, needs="virtual"),
    Right("course_torchrun", f"{TWO} course_trainer.py"),
    Right("accelerate", f"{TWO} accelerate_ddp.py", needs="hf"),
    Right(
        "accelerate_launch",
        "python -m accelerate.commands.launch --multi_gpu --num_processes 2 accelerate_ddp.py",
        reference="python -m accelerate.commands.launch --num_processes 1 accelerate_ddp.py",
        gpus=2,
        needs="hf virtual",
    ),
    Right("accelerate_accumulate", f"{TWO} accelerate_ddp.py --accumulate 2", needs="hf"),
    Right("accelerate_bf16", f"{TWO} accelerate_ddp.py --mixed-precision bf16", needs="hf"),
    Right("transformers", f"{TWO} transformers_trainer.py", needs="hf"),
    Right(
        "transformers_accumulate", f"{TWO} transformers_trainer.py --accumulate 2", needs="hf"
    ),
    Right("transformers_bf16", f"{TWO} transformers_trainer.py --bf16", needs="hf"),
)

CASES = ONE_PROCESS + DDP + SHARDED + LIBRARIES
