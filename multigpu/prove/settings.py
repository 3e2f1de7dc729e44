"""What a run of a proof does in each process; an environment variable carries it there."""

import json
import os
from dataclasses import asdict, dataclass

# The environment variable with the settings, as JSON. multigpu/site reads it, too.
VARIABLE = "MULTIGPU_PROVE"
# The steps of a run whose epoch does not end within LONGEST_EPOCH steps.
DEFAULT_STEPS = 20
LONGEST_EPOCH = 58
STEPS_AFTER_EPOCH = 2
SEED = 20_240


@dataclass(frozen=True)
class Order:
    """The order in which the ranks together read, for the reference's DataLoader.

    sampler  the type of the sampler that it replaces
    rows     the length of the data set of that DataLoader
    seed, shuffle  those of the ranks' DistributedSampler
    epochs   what the program gave to its set_epoch, for each epoch with a step
    """

    sampler: str
    rows: int
    seed: int
    shuffle: bool
    epochs: list[int]


@dataclass(frozen=True)
class Settings:
    """How the processes of one run behave.

    folder       where they leave their records
    steps        the optimizer steps after which they end; None: one epoch and two steps if
                 the epoch has at most LONGEST_EPOCH steps, else DEFAULT_STEPS
    disturb      by how many units in the last place weights begin away from the program's
    split        into how many parts layers split their batch, to add in another order
    batch_times  the factor of each DataLoader's batch size
    order        the order of rows for DataLoaders; None: the program's own
    one_gpu      whether DataParallel uses its first GPU alone
    no_dropout   whether dropout is switched off
    local        whether the gradients before synchronization are recorded, too
    rate         what each optimizer's learning rates are multiplied by during its step
    """

    folder: str
    steps: int | None = None
    disturb: int = 0
    split: int = 1
    batch_times: int = 1
    order: Order | None = None
    one_gpu: bool = False
    no_dropout: bool = False
    local: bool = False
    rate: float = 1.0

    def to_json(self) -> str:
        """The settings as the text of the environment variable."""
        return json.dumps(asdict(self))


def from_environment() -> Settings | None:
    """The settings of the run to which this process belongs; None outside of a proof."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    values = json.loads(text)
    return Settings(**values | {"order": values["order"] and Order(**values["order"])})
