"""Start the processes of a run, give each its rank, and end all of them together.

`relaunch` is not imported here: it imports torch, which takes a second.
"""

from multigpu.launch.exit import end_gloo
from multigpu.launch.room import check_room
from multigpu.launch.script import single_process_world, start
from multigpu.launch.spawning import call
from multigpu.launch.world import World, find_world

__all__ = [
    "World",
    "call",
    "check_room",
    "end_gloo",
    "find_world",
    "single_process_world",
    "start",
]
