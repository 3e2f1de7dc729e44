"""The functions of torch.cuda.random, for virtual GPUs."""

from collections.abc import Iterable

import torch

from multigpu.virtual.patches.devices import DeviceLike, meter_of
from multigpu.virtual.sim import machine as _machine


def default_generator(device: DeviceLike = None) -> torch.Generator:
    """The generator from which a device draws, unless a call names another one."""
    meter = meter_of(device)
    return meter.machine.generators[meter.index]


def manual_seed(seed: int) -> None:
    """Seed the current device's random numbers."""
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device's random numbers; torch.manual_seed calls this."""
    running = _machine.running()
    for generator in running.generators if running else ():
        generator.manual_seed(seed)


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """The state of the device's random numbers: 16 bytes, as on CUDA (ops/generator.py)."""
    return default_generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices."""
    return [generator.get_state() for generator in _machine.current().generators]


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    """Set the state of the device's random numbers."""
    default_generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the state of each device."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
