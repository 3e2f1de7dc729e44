"""A virtual GPU's random generator: a CPU generator whose `device` is a virtual GPU.

Each device has one, and torch.Generator(device="vgpu:1") makes another one. The numbers are
those of the same program on the CPU. Such a generator has a state of 5 KiB, but on CUDA a
state has 16 bytes, a seed and an offset, and DTensor computes with them. So a program gets 16
bytes: the seed, and as offset 0 for a generator that has not been used, else a hash of the
generator's own state. The own state goes along as an attribute, which torch.save and pickle
keep. For copies without the attribute the process remembers the last states that were read.
Any other seed and offset, such as those that DTensor computes for a shard, give a seed of
their own.
"""

import hashlib
import struct
import weakref
from collections import OrderedDict

import torch

from multigpu.virtual.sim.machine import Machine, current

# All virtual generators, by the address of the C++ generator. When torch passes a generator to
# a kernel, it makes a new Python object for the generator: only the address stays the same.
_generators: weakref.WeakValueDictionary[int, "VirtualGenerator"] = (
    weakref.WeakValueDictionary()
)
# Seed and offset: two unsigned integers of 8 bytes.
STATE = struct.Struct("<QQ")
# The number of states that a process remembers: 5 MiB.
REMEMBERED = 1024
# The generators' own states by (seed, offset), the oldest first.
_own_states: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()
_Generator = torch._C.Generator


class VirtualGenerator(torch.Generator):
    """A generator for a virtual GPU."""

    def __new__(cls, device: torch.device) -> "VirtualGenerator":
        return super().__new__(cls, "cpu")

    def __init__(self, device: torch.device):
        self._device = current().meter(device).device
        _generators[self._cdata] = self

    @property
    def device(self) -> torch.device:
        return self._device

    def get_state(self) -> torch.Tensor:
        """The state, as a tensor of 16 bytes on the host."""
        own_state = _Generator.get_state(self)
        seed = self.initial_seed()
        offset = _offset(seed, own_state)
        state = torch.frombuffer(bytearray(STATE.pack(seed, offset)), dtype=torch.uint8)
        state.own_state = own_state
        _own_states[seed, offset] = own_state
        if len(_own_states) > REMEMBERED:
            _own_states.popitem(last=False)
        return state

    def set_state(self, new_state: torch.Tensor) -> "VirtualGenerator":
        """Set a state of 16 bytes: one that was read, or a seed and an offset.

        Raises RuntimeError for a tensor of another size or dtype.
        """
        if new_state.dtype is not torch.uint8 or new_state.numel() != STATE.size:
            raise RuntimeError(
                f"RNG state is wrong size: a virtual GPU's state has {STATE.size} bytes "
                f"(torch.uint8), but this has {new_state.numel()} elements of "
                f"{new_state.dtype}."
            )
        seed, offset = STATE.unpack(bytes(new_state.tolist()))
        own_state = getattr(new_state, "own_state", None)
        # A program can have changed the bytes since it has read the state.
        if own_state is None or _offset(seed, own_state) != offset:
            own_state = _own_states.get((seed, offset))
        if own_state is not None:
            _Generator.set_state(self, own_state)
        else:
            self.manual_seed(_seed_of(seed, offset))
        return self

    def clone_state(self) -> "VirtualGenerator":
        return _with_state(self._device, self.get_state())

    def __reduce__(self) -> tuple:
        return _with_state, (self._device, self.get_state())


def _offset(seed: int, own_state: torch.Tensor) -> int:
    """0 for the own state of a generator that has just been seeded, else a hash of it."""
    if torch.equal(own_state, _Generator().manual_seed(seed).get_state()):
        return 0
    digest = hashlib.blake2b(own_state.numpy(), digest_size=6).digest()
    # CUDA's offsets are multiples of 4, and a program adds to them.
    return 4 * int.from_bytes(digest, "little") + 4


def _seed_of(seed: int, offset: int) -> int:
    """The seed of a generator's own for a seed and an offset."""
    if not offset:
        return seed
    digest = hashlib.blake2b(STATE.pack(seed, offset), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _with_state(device: torch.device, state: torch.Tensor) -> VirtualGenerator:
    return VirtualGenerator(device).set_state(state)


def make_default_generators(machine: Machine) -> list[torch.Generator]:
    """A generator for each device, all with the host's seed, as on CUDA."""
    seed = torch.initial_seed()
    return [VirtualGenerator(device).manual_seed(seed) for device in machine.devices]


def device_of(generator: torch.Generator) -> torch.device:
    """The generator's device, even if torch has made a new Python object for the generator."""
    return _generators.get(generator._cdata, generator).device
