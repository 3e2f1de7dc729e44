"""Draws who-keeps-what.png, the picture on this page, from counts on virtual GPUs.

python lessons/15-fsdp/picture.py
"""

from pathlib import Path

from experiments import draw_memory, script

from multigpu import plots

if __name__ == "__main__":
    figure = draw_memory([script.Zero1, script.Zero2, script.Zero3])
    print(plots.save(figure, Path(__file__).with_name("who-keeps-what.png")).name)
