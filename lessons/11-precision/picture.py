"""Draw memory.png, the picture on this lesson's page.

python lessons/11-precision/picture.py
"""

from pathlib import Path

from experiments import draw_memory, memory

from multigpu import plots

if __name__ == "__main__":
    print(
        plots.save(
            draw_memory(memory((64, 4096))), Path(__file__).with_name("memory.png")
        ).name
    )
