"""Which lines of lesson 05 does lesson 09 not have, and who does it now? Counted in the two scripts: python …/what_moved.py"""

import ast
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
WHO = {
    "the device: .to(), pin_memory": ((".to(", "pin_memory"), "Trainer: moves the module once and each batch"),
    "the ranks: find, pick, meet, process group": (
        ("launch.find", "devices.pick", "rendezvous", "process_group"), "Trainer(devices, num_nodes), by its strategy"),
    "DDP, no_sync": (("DDP(", "no_sync"), "strategy 'ddp'"),
    "the sampler: DistributedSampler, set_epoch": (
        ("DistributedSampler", "set_epoch"), "data module; the Trainer calls set_epoch"),
    "the step: zero_grad, backward, step": (("zero_grad", "backward()", ".step("), "Trainer's loop"),
    "16 bit: autocast, scaler": (("autocast", "caler"), "Trainer(precision)"),
    "sums over ranks: all_reduce": (("all_reduce", "everywhere"), "self.log(…, sync_dist=True)"),
    "train and eval mode, no_grad": ((".train()", ".eval()", "no_grad"), "Trainer's loops"),
    "checkpoints": (("heckpoint",), "ModelCheckpoint, Trainer.fit(ckpt_path)"),
    "the table of epochs": (("say(", "row", "perf_counter", "table", "Table"), "a callback: multigpu/trainer/callbacks/table.py"),
    "uneven batches: mean over images": (("images_in_step", "[:own]", "real"), "you, still"),
}  # fmt: skip


def code(stem: str) -> list[str]:
    """The script's lines of code: no imports, no comments, no prose, no cells of the notebook."""
    text = (SCRIPTS / f"{stem}.py").read_text()
    tree = ast.parse(text)
    skipped = set()
    for node in ast.walk(tree):
        alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or alone:
            skipped.update(range(node.lineno, node.end_lineno + 1))
    lines = [
        line.partition("  # ")[0].strip()
        for n, line in enumerate(text.splitlines(), 1)
        if n not in skipped
    ]
    return [line for line in lines if line and not line.startswith("#")]


def table() -> str:
    before, after = code("PT_CNN_MultiGPU"), code("PTL_multiGPU")
    rows = [f"{'lines about':<44}{'05':>4}{'09':>4}   who does it now"]
    for what, (words, who) in WHO.items():
        counts = [
            sum(any(word in line for word in words) for line in lines)
            for lines in (before, after)
        ]
        rows.append(f"{what:<44}{counts[0]:>4}{counts[1]:>4}   {who}")
    rows.append(f"{'all lines of code':<44}{len(before):>4}{len(after):>4}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
