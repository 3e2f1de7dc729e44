"""Draws two-orders.png, the picture on this page, from steps on virtual GPUs.

python lessons/19-context-experts/picture.py
"""

from pathlib import Path

from experiments import draw_orders, steps

from multigpu import launch, plots

if __name__ == "__main__":
    orders = ["plain", "zigzag"]
    of_ranks = launch.call(steps, 4, [(order, 32768) for order in orders])
    figure = draw_orders(dict(zip(orders, zip(*of_ranks, strict=True), strict=True)))
    print(plots.save(figure, Path(__file__).with_name("two-orders.png")).name)
