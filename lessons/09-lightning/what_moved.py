"""Which lines of lesson 05 lesson 09 does not have, and what replaces them.

python lessons/09-lightning/what_moved.py

The lines are counted in the two scripts.
"""

import ast
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"

# Subject: the texts by which a line is recognized, and what replaces the line.
SUBJECTS = {
    "the device: .to(), pin_memory": (
        (".to(", "pin_memory"),
        "Trainer moves the module and each batch",
    ),
    "the ranks: find, pick, rendezvous, group": (
        ("launch.find", "devices.pick", "rendezvous", "process_group"),
        "Trainer(devices, num_nodes)",
    ),
    "DDP, no_sync": (
        ("DDP(", "no_sync"),
        "strategy 'ddp'",
    ),
    "the sampler: DistributedSampler, set_epoch": (
        ("DistributedSampler", "set_epoch"),
        "data module; the Trainer calls set_epoch",
    ),
    "the step: zero_grad, backward, step": (
        ("zero_grad", "backward()", ".step("),
        "Trainer's loop",
    ),
    "16 bit: autocast, scaler": (
        ("autocast", "caler"),
        "Trainer(precision)",
    ),
    "sums over ranks: all_reduce": (
        ("all_reduce", "everywhere"),
        "self.log(…, sync_dist=True)",
    ),
    "train and eval mode, no_grad": (
        (".train()", ".eval()", "no_grad"),
        "Trainer's loops",
    ),
    "checkpoints": (
        ("heckpoint",),
        "ModelCheckpoint, Trainer.fit(ckpt_path)",
    ),
    "the table of epochs": (
        ("say(", "row", "perf_counter", "table", "Table"),
        "a callback: trainer/callbacks/table.py",
    ),
    "uneven batches: mean over images": (
        ("images_in_step", "[:own]", "real"),
        "you, still",
    ),
}


def code(stem: str) -> list[str]:
    """The script's lines of code, without imports, comments, prose and notebook cells."""
    text = (SCRIPTS / f"{stem}.py").read_text()
    skipped = set()
    for node in ast.walk(ast.parse(text)):
        is_import = isinstance(node, (ast.Import, ast.ImportFrom))
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_import or is_docstring:
            skipped.update(range(node.lineno, node.end_lineno + 1))
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if number not in skipped:
            lines.append(line.partition("  # ")[0].strip())
    return [line for line in lines if line and not line.startswith("#")]


def count(lines: list[str], texts: tuple[str, ...]) -> int:
    """The number of lines in which one of the texts occurs."""
    return sum(any(text in line for text in texts) for line in lines)


def table() -> str:
    before = code("PT_CNN_MultiGPU")
    after = code("PTL_multiGPU")
    rows = [f"{'lines about':<44}{'05':>4}{'09':>4}   what does it now"]
    for subject, (texts, replacement) in SUBJECTS.items():
        counts = f"{count(before, texts):>4}{count(after, texts):>4}"
        rows.append(f"{subject:<44}{counts}   {replacement}")
    rows.append(f"{'all lines of code':<44}{len(before):>4}{len(after):>4}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
