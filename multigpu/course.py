"""The course's folder, and the table of its lessons."""

from dataclasses import dataclass
from pathlib import Path

from multigpu.errors import UserError


@dataclass(frozen=True)
class Notebook:
    """A notebook of a lesson.

    stem       the name of its files: scripts/STEM.py, notebooks/STEM.ipynb, slurm/STEM.slurm
    name       a few words for a link
    continued  what it adds to the lesson's first notebook; "" for the first
    """

    stem: str
    name: str
    continued: str = ""


@dataclass(frozen=True)
class Lesson:
    """A lesson: its page is lessons/SLUG/README.md."""

    slug: str
    title: str
    minutes: int
    notebooks: tuple[Notebook, ...]

    @property
    def number(self) -> str:
        """01, 02, …"""
        return self.slug.partition("-")[0]

    @property
    def name(self) -> str:
        """The number and the title, for a link: 02 DataParallel."""
        return f"{self.number} {self.title}"


# README.md's and the syllabus's tables and all footers are made from this table:
# `multigpu notebooks footers` writes them.
LESSONS = (
    Lesson(
        "01-one-gpu",
        "One GPU first: baseline, data loading, where the time goes",
        30,
        (Notebook("PT_CNN_SingleGPU", "One GPU first"),),
    ),
    Lesson(
        "02-data-parallel",
        "DataParallel",
        30,
        (Notebook("PT_CNN_DataParallel", "DataParallel"),),
    ),
    Lesson(
        "03-model-parallel",
        "Model parallelism on two GPUs: naive, then pipelined",
        75,
        (
            Notebook("PT_CNN_ModelParallel", "Model parallelism"),
            Notebook("PT_CNN_Pipeline", "Pipeline", "one process per GPU"),
        ),
    ),
    Lesson(
        "04-ddp-spawn",
        "DDP with mp.spawn",
        30,
        (Notebook("PT_CNN_DDPSpawn", "DDP with mp.spawn"),),
    ),
    Lesson(
        "05-ddp-cluster",
        "DDP on a cluster: torchrun and Slurm, one node and many",
        75,
        (Notebook("PT_CNN_MultiGPU", "DDP on a cluster"),),
    ),
    Lesson(
        "06-hybrid-parallel",
        "Model and data parallel together",
        45,
        (Notebook("PT_CNN_HybridParallel", "Model and data parallel"),),
    ),
    Lesson(
        "07-mirrored-strategy",
        "TensorFlow: MirroredStrategy",
        60,
        (
            Notebook("TF_CNN_MultiGPU", "MirroredStrategy"),
            Notebook("TF_CNN_CustomLoop", "MirroredStrategy by hand", "the loop by hand"),
        ),
    ),
    Lesson(
        "08-tf-multi-node",
        "TensorFlow on several nodes",
        40,
        (Notebook("TF_CNN_MultiNode", "TensorFlow on several nodes"),),
    ),
    Lesson(
        "09-lightning",
        "The Lightning-style wrapper",
        40,
        (Notebook("PTL_multiGPU", "The Lightning-style wrapper"),),
    ),
    Lesson(
        "10-strategies",
        "Every strategy: dp, ddp, ddp_spawn, ddp2, Horovod, Bagua",
        90,
        (
            Notebook("PTL_Strategies", "Seven strategies"),
            Notebook("PTL_Compressed", "Compressed strategies", "rounded numbers"),
            Notebook("PTL_Decentralized", "Decentralized and async", "if nobody waits"),
            Notebook("PTL_NodeBatch", "A loss over a node's batch", "ddp2"),
        ),
    ),
    Lesson(
        "11-precision",
        "Precision: fp32, fp16, bf16, and which hardware supports each",
        40,
        (Notebook("PTL_Precision", "Precision"),),
    ),
    Lesson(
        "12-elastic",
        "Elastic and fault-tolerant training",
        60,
        (Notebook("PT_CNN_Elastic", "Elastic training"),),
    ),
    Lesson(
        "13-scaling",
        "Scaling analysis: measured here, predicted to 1,024 GPUs",
        50,
        (Notebook("PT_CNN_Scaling", "Scaling"),),
    ),
    Lesson(
        "14-memory",
        "Where the memory goes: does my model fit?",
        45,
        (Notebook("PT_GPT_Memory", "Where the memory goes"),),
    ),
    Lesson(
        "15-fsdp",
        "ZeRO and FSDP: who keeps what?",
        50,
        (Notebook("PT_GPT_FSDP", "ZeRO and FSDP"),),
    ),
    Lesson(
        "16-tensor-parallel",
        "Tensor and sequence parallelism: two GPUs share a layer",
        50,
        (Notebook("PT_GPT_TensorParallel", "Tensor parallelism"),),
    ),
    Lesson(
        "17-mesh",
        "Meshes: which layout for 7 billion parameters?",
        50,
        (Notebook("PT_GPT_Mesh", "Meshes"),),
    ),
    Lesson(
        "18-clinic",
        "Hanging, slow, wrong: the clinic",
        50,
        (Notebook("PT_Clinic", "The clinic"),),
    ),
    Lesson(
        "19-context-experts",
        "Long sequences and experts: who has which tokens?",
        50,
        (Notebook("PT_GPT_ContextExperts", "Long sequences and experts"),),
    ),
)


def find_root() -> Path:
    """The course's folder: the working directory, one above it, or this package's parent.

    Raises UserError if none of them has scripts/ and pyproject.toml.
    """
    current = Path.cwd()
    for folder in (current, *current.parents, Path(__file__).resolve().parent.parent):
        if (folder / "scripts").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    raise UserError(
        f"{current} is not in the course's folder, which has scripts/ and notebooks/: "
        f"change to it first."
    )
