"""Count the statements of lessons 05 and 09 by subject, and name what replaces lesson 05's.

Statements are counted in the two scripts, without imports and docstrings. A statement that
spans several lines counts once.
"""

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]

# Subject → the texts by which its statements are recognized, and what replaces them.
SUBJECTS = {
    "the device: .to(), pin_memory": (
        (".to(", "pin_memory"),
        "Trainer moves the module and each batch",
    ),
    "the ranks: find, pick, rendezvous, group": (
        ("find_world", "find_rank", "devices.pick", "join(", "process_group"),
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
        ("all_reduce", "sum_over_ranks"),
        "self.log(…, sync_dist=True)",
    ),
    "train and eval mode, no_grad": (
        (".train()", ".eval()", "no_grad"),
        "Trainer's loops",
    ),
    "checkpoints": (
        ("heckpoint",),
        "ModelCheckpoint, fit(ckpt_path)",
    ),
    "the line of an epoch": (
        ("history", "print(f'epoch", "Epochs(", "line"),
        "you, in a callback",
    ),
    "uneven batches: mean over images": (
        ("images_in_step", "weight = row", "row = ", "* weight", "row < total"),
        "you, still",
    ),
}


def statements(stem: str) -> list[str]:
    """The script's statements as text; a compound one (def, for, with) as its first line."""
    texts = []
    for node in ast.walk(ast.parse((ROOT / "scripts" / f"{stem}.py").read_text())):
        is_import = isinstance(node, (ast.Import, ast.ImportFrom))
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_import and not is_docstring:
            texts.append(first_line(node))
    return texts


def first_line(node: ast.stmt) -> str:
    """A simple statement, or a compound one without its body; decorators included."""
    lines = ast.unparse(node).splitlines()
    if not hasattr(node, "body"):
        return " ".join(lines)
    return " ".join(lines[: len(getattr(node, "decorator_list", [])) + 1])


def count(lines: list[str], texts: tuple[str, ...]) -> int:
    """The number of statements in which one of the texts occurs."""
    return sum(any(text in line for text in texts) for line in lines)


def about_any(lines: list[str]) -> int:
    """The number of statements about one or more of the subjects."""
    return count(lines, tuple(text for texts, _ in SUBJECTS.values() for text in texts))


def bars() -> "Figure":
    """The counts of both scripts as bars, two for each subject, with what replaces it."""
    before = statements("PT_CNN_MultiGPU")
    after = statements("PTL_multiGPU")
    fig = plots.figure(8, 4.2)
    axes = fig.add_subplot()
    for row, (texts, replacement) in enumerate(SUBJECTS.values()):
        counts = (count(before, texts), count(after, texts))
        for place, number in enumerate(counts):
            name = ("lesson 05", "lesson 09")[place] if row == 0 else None
            style = {"height": 0.36, "color": plots.RANKS[place], "label": name}
            axes.barh(row + 0.2 * (2 * place - 1), number, edgecolor=plots.EDGE, **style)
        text = f"{counts[0]} → {counts[1]}: {replacement}"
        axes.text(max(counts) + 0.2, row, text, va="center", fontsize=8)
    parts = [f"{about_any(lines)} of {len(lines)}" for lines in (before, after)]
    title = "About these subjects: {} statements, then {}".format(*parts)
    axes.set(title=title, xlabel="statements, and what does their work now", xlim=(0, 14))
    axes.set_yticks(range(len(SUBJECTS)), list(SUBJECTS), fontsize=8)
    axes.invert_yaxis()
    axes.legend(fontsize=9, loc="lower right")
    return fig
