"""Draws replicas-of-stages.png, the picture on this page, from a simulation.

python lessons/06-hybrid-parallel/picture.py
"""

from pathlib import Path

from experiments import INSIDE, joined, two_nodes

if __name__ == "__main__":
    (by_rank,) = two_nodes(("large", INSIDE, "HDR200"))
    timeline = joined(by_rank)
    on_gpu_0 = [e for e in timeline.events if e.kind == "collective" and e.device == 0]
    assert {event.name for event in on_gpu_0} == {"allreduce"}
    seconds = sum(event.end - event.start for event in on_gpu_0)
    step = timeline.end - timeline.start
    title = "Stages exchange micro-batches; with HDR200 the replicas' all-reduce takes "
    title += f"{seconds / step:.0%}"
    path = Path(__file__).with_name("replicas-of-stages.png")
    print(timeline.plot(path, title).name)
