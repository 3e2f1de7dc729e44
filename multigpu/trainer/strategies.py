"""The strategies, as in `from multigpu.trainer.strategies import DDPStrategy`."""

from multigpu.strategies import *  # noqa: F403
from multigpu.strategies import __getattr__ as __getattr__
