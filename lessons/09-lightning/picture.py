"""Draws one-fit.png, the picture on this page.

python lessons/09-lightning/picture.py

The order is recorded in a run on two ranks: what the user writes as it is called, the
Trainer's own work by the hook beside it. The widths have no meaning.
"""

import sys
from pathlib import Path

from multigpu import launch, plots

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
# The looks of what the user writes, what the Trainer does, and what all ranks do together.
YOURS = "compute"
TRAINERS = "idle"
TOGETHER = "activations"  # a look without a hatch, which would make the text hard to read
YOUR_METHODS = (
    "setup",
    "configure_optimizers",
    "train_dataloader",
    "training_step",
    "val_dataloader",
    "validation_step",
)
# The recorded hook's name → the text and the look of its box.
HOOKS = {
    "on_fit_start": ("DDP:\nrank 0's\nweights\nfor all", TOGETHER),
    "on_before_backward": ("backward,\nall-reduce", TOGETHER),
    "on_before_optimizer_step": ("optimizer.\nstep()", TRAINERS),
    "on_validation_end": ("self.log:\nthe sums", TOGETHER),
    "on_train_epoch_end": ("checkpoint:\nrank 0\nwrites,\nthe others\nwait", TOGETHER),
}


def recorded() -> list[str]:
    """The names of the methods and hooks that one rank calls in an epoch of one batch."""
    import PTL_multiGPU as lesson

    order: list[str] = []
    module = lesson.LitCNN(0.05, 0)
    digits = lesson.DigitsData(None, 64, 0)
    for owner in (digits, module):
        for name in YOUR_METHODS:
            method = getattr(type(owner), name, None)
            if method is not None and method.__qualname__.startswith(type(owner).__name__):

                def call(*args, method=method, owner=owner, name=name, **keywords):
                    sanity = trainer.sanity_checking and name == "validation_step"
                    order.append("sanity check" if sanity else name)
                    return method(owner, *args, **keywords)

                owner.__dict__[name] = call
    spy = lesson.L.Callback()
    for name in HOOKS:

        def hook(trainer, *_, name=name):
            if not trainer.sanity_checking:
                order.append(name)

        setattr(spy, name, hook)
    trainer = lesson.L.Trainer(
        strategy="ddp",
        max_epochs=1,
        limit_train_batches=1,
        callbacks=[spy],
        **dict.fromkeys(OFF, False),
    )
    trainer.fit(module, datamodule=digits)
    return order


def text_and_look(name: str) -> tuple[str, str]:
    if name == "sanity check":
        return "sanity\ncheck:\nvalidation_\nstep", YOURS
    return HOOKS[name] if name in HOOKS else (name.replace("_", "_\n", 1), YOURS)


def draw(ranks: list[list[str]], path: Path) -> Path:
    assert all("training_step" in order for order in ranks)
    title = "trainer.fit on two ranks: you write the blue boxes, the Trainer does the rest"
    rows = [f"rank {rank}" for rank in range(len(ranks))]
    axes = plots.schematic(rows, title, width=9.8, height=3.2)
    longest = max(ranks, key=len)
    for row, order in enumerate(ranks):
        # A rank with fewer calls waits for the others.
        missing = len(longest) - len(order)
        if missing:
            style = {"ha": "center", "va": "center", "fontsize": 8, "style": "italic"}
            axes.text(0.5 * missing, row, "waits", **style)
        for place, name in enumerate(order, start=missing):
            text, look = text_and_look(name)
            middle, height = row, 0.8
            if look == TOGETHER:  # one box over all ranks
                if row:
                    continue
                middle, height = (len(ranks) - 1) / 2, len(ranks) - 0.2
            plots.box(axes, look, place + 0.03, middle, 0.94, text, height, size=8)
    repeated = {
        "for each batch": ("training_step", "on_before_optimizer_step", -0.62),
        "for each epoch": ("training_step", "on_train_epoch_end", -1.12),
    }
    for text, (first, last, height) in repeated.items():
        left, right = longest.index(first), longest.index(last) + 1
        bracket = [height + 0.1, height, height, height + 0.1]
        axes.plot([left, left, right, right], bracket, color=plots.INK, linewidth=1)
        middle = (left + right) / 2
        axes.text(middle, height - 0.05, text, ha="center", va="bottom", fontsize=8)
    axes.set(xlim=(0, len(longest)), ylim=(len(ranks) - 0.5, -1.5))
    order_only = "order: blue as called, others by their hooks; the widths mean nothing"
    axes.set_xlabel(order_only, loc="right", fontsize=8)
    names = {
        YOURS: "you write it",
        TRAINERS: "the Trainer does it",
        TOGETHER: "the Trainer does it, all ranks together",
    }
    handles = [plots.swatch(look) for look in names]
    axes.figure.legend(handles, names.values(), loc="outside lower left", ncols=3)
    return plots.save(axes.figure, path)


if __name__ == "__main__":
    print(draw(launch.call(recorded, 2), Path(__file__).with_name("one-fit.png")).name)
