"""Draws who-keeps-what.png, the picture on this page, from counts on virtual GPUs.

python lessons/15-fsdp/picture.py
"""

from pathlib import Path

from experiments import draw_memory
from zero import Zero1, Zero2, Zero3

from multigpu import plots

if __name__ == "__main__":
    figure = draw_memory([Zero1, Zero2, Zero3])
    print(plots.save(figure, Path(__file__).with_name("who-keeps-what.png")).name)
