"""Draws by-link.png, the picture on this page, from a simulation.

python lessons/16-tensor-parallel/picture.py
"""

from pathlib import Path

from experiments import draw_steps, of_links

from multigpu import plots

if __name__ == "__main__":
    results = of_links(("NVLink3", "HDR200", "RoCE100", "Ethernet25"))
    title = "A step of a large GPT on one A100, and shared by two (simulated)"
    figure = draw_steps(results, title)
    print(plots.save(figure, Path(__file__).with_name("by-link.png")).name)
