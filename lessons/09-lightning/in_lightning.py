"""Does the real Lightning run the same classes, and open the same checkpoint? python …/in_lightning.py [last.ckpt]

The script is read with one import changed, to `import lightning as L`.
"""

import importlib.util
import logging
import sys
import types
import warnings
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "PTL_multiGPU.py"
OURS, THEIRS = "import multigpu.trainer as L", "import lightning as L"


def swapped() -> types.ModuleType:
    """The lesson's script, with the real Lightning in it."""
    warnings.simplefilter("ignore")  # of workers, of loggers: nothing that changes a number
    text = SCRIPT.read_text()
    assert text.count(OURS) == 1
    module = types.ModuleType("PTL_multiGPU")
    module.__file__ = str(SCRIPT)
    sys.modules[module.__name__] = module
    exec(compile(text.replace(OURS, THEIRS), SCRIPT, "exec"), module.__dict__)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return module


def train(lesson: types.ModuleType, library: object, **more: object):
    """Two epochs, in `library`'s Trainer."""
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
        False,
    )
    trainer = library.Trainer(accelerator="cpu", max_epochs=2, **{"devices": 1} | quiet | more)
    model = lesson.LitCNN(0.05, seed=0)
    trainer.fit(model, datamodule=lesson.DigitsData(None, 64, seed=0))
    return model, trainer


def main() -> None:
    import torch

    from multigpu import proof

    theirs = swapped()
    sys.path.insert(0, str(SCRIPT.parent))
    del sys.modules["PTL_multiGPU"]
    import PTL_multiGPU as ours

    (one, trainer), (other, twin) = train(ours, ours.L), train(theirs, theirs.L)
    numbers = [f"{float(each.callback_metrics['loss']):.4f}" for each in (trainer, twin)]
    apart = proof.difference(one.net, other.net)
    print(
        f"two epochs: loss {numbers[0]} here, {numbers[1]} in Lightning, weights within 1e-6: {apart <= 1e-6}"
    )
    if len(sys.argv) > 1:
        opened = theirs.LitCNN.load_from_checkpoint(sys.argv[1], map_location="cpu")
        stored = torch.load(sys.argv[1], weights_only=True)["state_dict"]
        same = all(
            torch.equal(value, stored[name]) for name, value in opened.state_dict().items()
        )
        print(
            f"Lightning opens the checkpoint: {type(opened).__name__}, lr {opened.hparams.lr}, the same weights: {same}"
        )


if __name__ == "__main__":
    if importlib.util.find_spec("lightning") is None:
        print("skipped: lightning is not installed (pip install lightning)")
    else:
        main()
