"""What processes can be sent, what they do with a tensor, how far their weights are apart."""

import pickle

import cloudpickle
import torch


def senders(obj: object) -> list[str]:
    """The names of the picklers that can write `obj` as bytes."""
    names = []
    for pickler in (pickle, cloudpickle):
        try:
            pickler.dumps(obj)
        except (TypeError, AttributeError, pickle.PicklingError):
            continue
        names.append(pickler.__name__)
    return names


def set_to_zero(rank: int, tensor: torch.Tensor) -> None:
    """Set `tensor` to zero, in place. mp.spawn gives the rank, which is not used."""
    tensor.zero_()


Way = tuple[str, str]
Weights = tuple[torch.Tensor, torch.Tensor]  # before and after


def distances(first: dict[Way, Weights], other: dict[Way, Weights]) -> dict[Way, list[float]]:
    """The largest difference of two ranks' weights before and after, by way; prints them."""
    differences = {}
    for way in first:
        pairs = zip(first[way], other[way], strict=True)
        differences[way] = [(a - b).abs().max().item() for a, b in pairs]
        before, after = differences[way]
        print(f"{', '.join(way)}: {before:.2f} apart, then {after:.2f}")
    return differences
