"""Draws one-step.png, the picture on this page, from a simulation.

python lessons/02-data-parallel/picture.py
"""

from pathlib import Path

from experiments import Training, carried

import multigpu

gpus = multigpu.gpus(2, gpu="V100-16GB", link="NVLink2", shapes_only=True)
timeline = Training(gpus, 1024).timeline()

notes = [timeline.notes.get(event) for event in timeline.events]
assert notes.count("weights") == 1
assert notes.count("inputs") == 2  # from the host to GPU 0, and from there to GPU 1
title = f"A step sends images and weights to GPU 1, which is busy {timeline.busy(1):.0%} "
title += "of the time"
path = Path(__file__).with_name("one-step.png")
print(timeline.plot(path, title, contents=carried(timeline)).name)
