"""Draws who-talks.png, the picture on this page: the groups of a rank.

python lessons/17-mesh/picture.py
"""

from pathlib import Path

from experiments import draw_orders

from multigpu import plots

if __name__ == "__main__":
    print(plots.save(draw_orders(), Path(__file__).with_name("who-talks.png")).name)
