"""Draws slow.png, the picture on this page, from a simulation.

python lessons/18-clinic/picture.py
"""

from pathlib import Path

from experiments import draw, timelines

from multigpu import plots

if __name__ == "__main__":
    ill, cured = timelines("slow")
    figure = draw(
        {"Only rank 0 evaluates: rank 1 waits": ill, "Each rank evaluates half": cured}
    )
    print(plots.save(figure, Path(__file__).with_name("slow.png")).name)
