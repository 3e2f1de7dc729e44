"""What a batch may be: mappings, dataclasses, named tuples, packed sequences."""

import collections
from dataclasses import InitVar, dataclass, field

import pytest
import torch
from plain_net import Net, rows, trainer
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from multigpu.nested import map_tensors
from multigpu.trainer.hooks import to_device
from multigpu.virtual import control

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Scaled:
    """Its __init__ does more than to keep what it is given."""

    x: torch.Tensor
    by: InitVar[float] = 2.0
    scale: float = field(init=False, default=1.0)

    def __post_init__(self, by):
        self.x, self.scale = self.x * by, by


def test_a_dataclass_is_copied_and_not_made_anew():
    given = Scaled(torch.ones(2))
    new = map_tensors(given, lambda tensor: tensor + 1)
    assert (new.x.tolist(), new.scale, given.x.tolist()) == ([3.0, 3.0], 2.0, [2.0, 2.0])


def test_a_packed_sequence_goes_to_a_device_as_a_whole(request):
    request.addfinalizer(control.stop)
    (device,) = control.start(1)
    moved = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), device)
    assert (moved.data.device, moved.batch_sizes.device.type) == (device, "cpu")


Pair = collections.namedtuple("Pair", "x y")


def test_named_tuples_in_other_numbers():
    class Named(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch.x, batch_idx)

    data = [Pair(row, 1) for row in rows()]
    for precision in ("64-true", "bf16-true"):
        trainer(precision=precision).fit(Named(), DataLoader(data, 4))
