"""The previous names of this package's functions, for callers that still import them.

Delete this file once they import from the modules below.
"""

from multigpu.trainer.checkpointing.contents import compose_checkpoint as compose
from multigpu.trainer.checkpointing.from_checkpoint import module_from_checkpoint as construct
from multigpu.trainer.checkpointing.reading import read_checkpoint as read
from multigpu.trainer.checkpointing.restoring import resolve_path as named
from multigpu.trainer.checkpointing.restoring import restore_model as restored
from multigpu.trainer.checkpointing.restoring import restore_training
from multigpu.trainer.checkpointing.saving import save_checkpoint as save

__all__ = ["compose", "construct", "named", "read", "restore_training", "restored", "save"]
