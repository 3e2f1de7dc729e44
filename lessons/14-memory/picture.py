"""Draws over-time.png, the picture on this page, from a simulation.

python lessons/14-memory/picture.py
"""

from pathlib import Path

from experiments import draw_over_time, over_time

from multigpu import plots
from multigpu.memory import MODELS, Training

if __name__ == "__main__":
    steps = {}
    for way in ("none", "full"):
        training = Training(4, attention="math", checkpointing=way)
        steps[f"checkpointing: {way}"] = over_time(MODELS["gpt-1.3b"], training)
    title = "Checkpointing: fewer activations, a longer step (A100, simulated)"
    figure = draw_over_time(steps, title)
    print(plots.save(figure, Path(__file__).with_name("over-time.png")).name)
