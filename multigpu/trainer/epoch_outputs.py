"""The hooks of Lightning 1.x that get an epoch's step outputs, such as validation_epoch_end.

Lightning 2 has no such hooks. In Lightning 1.x and here, `outputs` has one item per batch of
this rank. With several dataloaders it is a list of such lists. To see all ranks' outputs, call
self.all_gather in the hook, or log a value: the mean of the ranks counts each rank as often as
it has outputs, so the mean of `outputs` is the mean over all batches of all ranks.
"""

from typing import TYPE_CHECKING, Any

from multigpu.nested import map_tensors
from multigpu.trainer.module import LightningModule

if TYPE_CHECKING:
    from multigpu.trainer.run import Run


class EpochOutputs:
    """Collects the step outputs of an epoch, and calls the hook `name` with them."""

    def __init__(self, name: str, loaders: int = 1):
        self.name = name
        self.of_loaders: list[list[Any]] = [[] for _ in range(loaders)]

    def add(self, output: Any, number: int = 0) -> None:
        """Keep an output, detached from its graph; as in Lightning 1.x, None is left out."""
        if output is not None:
            detached = map_tensors(output, lambda tensor: tensor.detach())
            self.of_loaders[number].append(detached)

    def call(self, run: "Run") -> None:
        """Call the hook with the outputs so far, and begin with an empty list."""
        of_loaders = self.of_loaders
        self.of_loaders = [[] for _ in of_loaders]
        outputs = of_loaders[0] if len(of_loaders) == 1 else of_loaders
        weight = sum(map(len, of_loaders))
        with run.log.within(self.name, weight):
            returned = getattr(run.module, self.name)(outputs)
        if returned is not None:
            run.state.warn_once(
                f"{self.name} returned {type(returned).__name__}, which is not used: log the "
                f"values with self.log."
            )


def collect(module: LightningModule, name: str, loaders: int = 1) -> EpochOutputs | None:
    """Return an EpochOutputs if the module has the hook `name`, else None."""
    return EpochOutputs(name, loaders) if callable(getattr(module, name, None)) else None
