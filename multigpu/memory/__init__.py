"""How much memory the training of a GPT takes, before it runs: `multigpu memory`.

from multigpu.memory import MODELS, Step, Training
from multigpu.virtual.sim.presets import GPUS
Step(MODELS["gpt-1.3b"], Training(batch=4), GPUS["A100-80GB"]).peak()
"""

from multigpu.memory.formula import MODELS, Model, Step, Training, find_model

__all__ = ["MODELS", "Model", "Step", "Training", "find_model"]
