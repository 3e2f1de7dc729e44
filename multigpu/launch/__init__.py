"""Start the processes of a run, give each its rank, and end all of them together.

`relaunch` is not imported here: it imports torch, which takes a second.
"""

from multigpu.launch.exit import end_gloo
from multigpu.launch.script import alone, start
from multigpu.launch.spawning import call, spawn
from multigpu.launch.world import World, find

__all__ = ["World", "alone", "call", "end_gloo", "find", "spawn", "start"]
