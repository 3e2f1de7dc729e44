"""Writes benchmarks/README.md and the figures on lessons/virtual.md, from the reports here.

    python benchmarks/page.py

A figure on lessons/virtual.md follows a comment that readers do not see: the report, where the
number is in it, and its format. A test compares both pages with the reports, and README.md's
figures with benchmarks/README.md.

    <!--= nanogpt.json seconds.step .2f -->0.54 s
"""

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LESSON = HERE.parent / "lessons" / "virtual.md"
FIGURE = re.compile(r"(<!--= (\w+)\.json ([\w.]+) (\S+) -->)([-+]?[\d.,]*\d%?)?")
INTRODUCTION = """\
# What was measured

`python benchmarks/page.py` writes this page from the reports in this folder. The machine has
2 cores and no GPU; torch is 2.13. It is shared, and its speed varies: figures are medians of
pairs or rounds that were measured side by side, with their range where the report has one.
“Published” figures are other people's; “simulated” ones are virtual GPUs'. `make bench`
measures most of them again.
"""


def report(name: str) -> Any:
    """The content of a report, by its name."""
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def ranged(row: dict, digits: int = 2, unit: str = "×") -> str:
    """A median, with its range if the report has one, as text."""
    median = f"{row['median']:.{digits}f}{unit}"
    limits = row.get("quartiles") or row.get("interval")
    if not limits and "min" in row:
        limits = (row["min"], row["max"])
    if not limits:
        return median
    return f"{median} ({limits[0]:.{digits}f} to {limits[1]:.{digits}f})"


def training() -> list[str]:
    rows = report("lesson05")["rows"]
    own, lightning = report("trainer")["rows"][:2]
    return [
        f"| images/s, 2 processes ÷ 1, batch 4,096 | {ranged(rows[0])} | goal 1.8 |",
        f"| the same, processes that never communicate | {ranged(rows[1])} | an upper bound |",
        f"| a step of the Trainer, above a plain loop | {ranged(own, 0, ' µs')} "
        f"| Lightning: {lightning['median']:.0f} µs |",
    ]


def virtual_gpus() -> list[str]:
    found = [
        f"| {row['quantity']} | {ranged(row)} | {row['goal']} |"
        for row in report("vgpu_speed")["rows"]
        if "rounds" in row  # the others are no ratios
    ]
    start, operation, step = report("virtual")["rows"]
    seconds = f"{start['median']:.2f} s"
    return [
        *found,
        f"| start of a script, under the command − by itself | {seconds} | at most 0.5 |",
        f"| operation, under the command ÷ without it | {ranged(operation)} | at most 1.05 |",
        f"| CNN step, under the command ÷ without it | {ranged(step)} | |",
    ]


def fidelity() -> list[str]:
    found = report("vgpu_fidelity")
    rows = [
        f"| {row['quantity']} | {row['published']:.2f} | {row['simulated']:.2f} "
        f"| {row['error']:+.0%} |"
        for row in found["rows"]
    ]
    rows.append(
        f"| median and largest error, without sign | | | {found['median_error']:.0%}, "
        f"{found['largest_error']:.0%} |"
    )
    return rows


def memory() -> list[str]:
    """The peaks of the cases, then the published ones beside the formula, with the reason."""
    found = report("memory")
    rows = []
    for row in found["rows"]:
        how = [row[name] for name in ("optimizer", "precision", "checkpointing", "attention")]
        gib = " | ".join(f"{row[name] / 2**30:.2f}" for name in ("formula", "meter", "report"))
        name = f"{row['model']}, {row['batch']} × 2,048 tokens, {', '.join(how)}"
        rows.append(f"| {name} | {gib} | {row['error']:.2%} |")
    return rows


def published_memory() -> list[str]:
    found = report("memory")
    rows = [
        f"| a layer more, GPT-2 of {row['hidden']} hidden units and {row['heads']} heads, "
        f"A100, [Adan](https://github.com/sail-sg/Adan/tree/main/fused_adan) "
        f"| {row['published_mb']:,.0f} MB | {row['formula_mb']:,.0f} "
        f"| {row['their_model_mb']:,.0f} MB ({row['error']:+.1%}) if it keeps dropout's masks "
        f"and outputs, and a GELU of several operations |"
        for row in found["adan"]
    ]
    for row in found["h100"]:
        cast = ", with the logits that it casts" if "bf16" in row["case"] else ""
        rows.append(
            f"| {row['case']}, measured on an H100 (`gpu_check.py`) "
            f"| {row['measured']:,.0f} MiB "
            f"| {row['formula']:,.0f} | {row['error']:+.1%}{cast} |"
        )
    for row in found["zero"]:
        if row["attention"] == "flash":
            why = "24 sbh for a block, a rounded estimate; this model keeps 36 sbh"
            if row["checkpointing"] == "full":
                why = "an estimate, in 16 bit; autocast keeps a block's input in 32 bit"
            rows.append(
                f"| activations, GPT-2 of 1.5 billion weights, 32 × 1,024 tokens, "
                f"checkpointing {row['checkpointing']}, "
                f"[ZeRO](https://arxiv.org/abs/1910.02054), section 3.2 "
                f"| {row['published_gb']} GB | {row['formula_gb']:.0f} | {why} |"
            )
    return rows


def others() -> list[str]:
    vtrain = report("vtrain")["summary"]["judged"]
    scaling = report("scaling")
    outside = report("outside")["summary"]
    standing = report("standing")["summary"]
    prove = report("prove")
    verdicts = [row["verdict"] for row in prove["outside"]["rows"]]
    holds, fails, unknown = map(verdicts.count, ("holds", "fails", "unknown"))
    alarms, cost = prove["false_alarms"], prove["costs"]
    peer = report("peer")
    tests = peer["counts"]
    public = sum(tests[kind] for kind in ("passed", "documented", "differs"))
    faults = report("faults")
    well = faults["faults"] - faults["failed"]
    grading = {row["name"]: row["median"] for row in report("grading")["rows"]}
    ours, nbgrader = (
        grading[f"{name}, 100 submissions, seconds"] for name in ("ours", "nbgrader")
    )
    return [
        f"| GPT's data-parallel steps on 4 and 8 A100s, mean error against a published table "
        f"| {vtrain['mean_error']:.1%} | `vtrain`; the table's own time on 2 GPUs gives "
        f"{vtrain['null_linear']:.1%}: its times are sums |",
        f"| scaling efficiency of {len(scaling['rows'])} published runs, mean error "
        f"| {scaling['error']:.1%} | `scaling`; “no loss at all” is "
        f"{scaling['null_error']:.1%} off |",
        f"| public CUDA scripts under `multigpu virtual`: losses of a reference run "
        f"| {outside['equal']} of {outside['scripts']} equal, {outside['differ']} different "
        f"| `outside`; the others cannot be compared |",
        f"| scripts that do what their reference does, under `multigpu virtual` "
        f"| {standing['virtual']['right']} of {standing['scripts']}; under FakeGPU "
        f"{standing['fakegpu']['right']} | `standing` |",
        f"| public scripts under `multigpu prove` "
        f"| {holds} hold, {fails} fail, of {unknown} nothing can be said | `prove` |",
        f"| right programs of which `multigpu prove` says that they fail "
        f"| {alarms['fails']} of {alarms['proofs']} | `prove` |",
        f"| a step with the recorder of `multigpu prove` ÷ without, GPT of 10.8 million "
        f"parameters | {cost['step']['median']:.2f}×, memory {cost['memory']['median']:.2f}× "
        f"| `prove`; goals 1.25 and 1.15 |",
        f"| of Lightning's own tests, those of public behaviour that pass with this Trainer "
        f"| {tests['passed']} of {public}; {tests['documented']} others need what it "
        f"refuses in a sentence or does otherwise on purpose | `peer` |",
        f"| elastic runs killed at a random moment that end as if never killed "
        f"| {well} of {faults['faults']} | `faults` |",
        f"| seconds to grade 100 submissions | {ours:.0f}; nbgrader {nbgrader:.0f} "
        f"| `grading` |",
    ]


def page() -> str:
    """The text of benchmarks/README.md."""
    measured = "| What | Median (range) | |\n|---|---|---|"
    compared = "| Ratio | published | simulated | error |\n|---|---|---|---|"
    single = "| What | Result | Report |\n|---|---|---|"
    peaks = "| Training | formula | meter | report | error |\n|---|---|---|---|---|"
    beside = "| What | published | formula | what differs |\n|---|---|---|---|"
    gpu = "[NVIDIA H100](gpu/NVIDIA-H100-80GB-HBM3.md)"
    parts = [
        INTRODUCTION,
        "## Training (`lesson05.py`, `trainer.py`)",
        "\n".join([measured, *training()]),
        "## Virtual GPUs: their cost on the CPU (`vgpu_speed.py`, `virtual.py`)",
        "\n".join([measured, *virtual_gpus()]),
        "## Simulated against published ratios (`vgpu_fidelity.py`, with sources)",
        "\n".join([compared, *fidelity()]),
        "## Peak memory of GPTs, in GiB (`memory.py`)",
        "The formula is that of `multigpu memory`. `meter` is torch.cuda.max_memory_allocated "
        "of virtual GPUs with shapes only, `report` what `multigpu virtual` reports.",
        "\n".join([peaks, *memory()]),
        "\n".join([beside, *published_memory()]),
        "## Others",
        "\n".join([single, *others()]),
        f"On a real GPU, `make gpu-check` compares virtual GPUs with it: {gpu}. That report "
        "is of 2026-11-27, when the check had more sections.",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def with_figures(text: str) -> str:
    """A page with its figures, each after the comment that says where it is from."""

    def figure(match: re.Match) -> str:
        value = report(match[2])
        for key in match[3].split("."):
            value = value[int(key) if isinstance(value, list) else key]
        return f"{match[1]}{value:{match[4]}}"

    return FIGURE.sub(figure, text)


if __name__ == "__main__":
    (HERE / "README.md").write_text(page(), encoding="utf-8")
    lesson = with_figures(LESSON.read_text(encoding="utf-8"))
    LESSON.write_text(lesson, encoding="utf-8")
