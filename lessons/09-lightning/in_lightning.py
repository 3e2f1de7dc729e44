"""Run the lesson's classes in the real Lightning, and open the lesson's checkpoint there.

    python lessons/09-lightning/in_lightning.py [last.ckpt]

One import of the lesson's script is changed, to `import lightning as L`.
"""

import importlib.util
import logging
import sys
import types
import warnings
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "PTL_multiGPU.py"
THIS_TRAINER = "import multigpu.trainer as L"
LIGHTNING = "import lightning as L"
OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def with_lightning() -> types.ModuleType:
    """The lesson's script as a module that uses the real Lightning."""
    # Lightning warns about loaders' workers and about loggers: neither changes a number.
    warnings.simplefilter("ignore")
    text = SCRIPT.read_text()
    assert text.count(THIS_TRAINER) == 1
    module = types.ModuleType("PTL_multiGPU")
    module.__file__ = str(SCRIPT)
    sys.modules[module.__name__] = module
    exec(compile(text.replace(THIS_TRAINER, LIGHTNING), SCRIPT, "exec"), module.__dict__)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return module


def train(lesson: types.ModuleType) -> tuple:
    """The lesson's module after two epochs, and the Trainer that trained it."""
    settings = dict.fromkeys(OFF, False)
    trainer = lesson.L.Trainer(accelerator="cpu", devices=1, max_epochs=2, **settings)
    model = lesson.LitCNN(0.05, seed=0)
    trainer.fit(model, datamodule=lesson.DigitsData(None, 64, seed=0))
    return model, trainer


def main() -> None:
    import torch

    from multigpu import proof

    in_lightning = with_lightning()
    sys.path.insert(0, str(SCRIPT.parent))
    del sys.modules["PTL_multiGPU"]
    import PTL_multiGPU as in_this_trainer

    model, trainer = train(in_this_trainer)
    twin, real_trainer = train(in_lightning)
    loss = float(trainer.callback_metrics["loss"])
    real_loss = float(real_trainer.callback_metrics["loss"])
    within = proof.difference(model.net, twin.net) <= 1e-6
    losses = f"loss {loss:.4f} in this Trainer, {real_loss:.4f} in Lightning"
    print(f"two epochs: {losses}, weights within 1e-6: {within}")

    if len(sys.argv) > 1:
        opened = in_lightning.LitCNN.load_from_checkpoint(sys.argv[1], map_location="cpu")
        stored = torch.load(sys.argv[1], weights_only=True)["state_dict"]
        values = opened.state_dict()
        same = all(torch.equal(value, stored[name]) for name, value in values.items())
        content = f"{type(opened).__name__}, lr {opened.hparams.lr}"
        print(f"Lightning opens the checkpoint: {content}, the same weights: {same}")


if __name__ == "__main__":
    if importlib.util.find_spec("lightning") is None:
        print("skipped: lightning is not installed (pip install lightning)")
    else:
        main()
