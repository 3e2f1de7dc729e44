"""How much arithmetic a program does: what is needed for the utilisation of a GPU's peak."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch.utils.flop_counter import flop_registry

from multigpu.virtual.sim import attention
from multigpu.virtual.sim.clock import Clock
from multigpu.virtual.sim.cost import ATTENTION, Costs
from multigpu.virtual.sim.presets import Gpu


class CountingCosts(Costs):
    """Costs that count the FLOPs of matrix products, convolutions and attention.

    `flops` has their sums by the phase of the clock, and by the peak in FLOP/s of the units
    that compute them. The formulas are those of torch.utils.flop_counter. As is usual for the
    utilisation of GPUs, a causal mask is not subtracted.
    """

    def __init__(self, gpu: Gpu, host_factor: float, clock: Clock):
        super().__init__(gpu, host_factor)
        self.clock = clock
        self.flops: Counter[tuple[str, float]] = Counter()

    def seconds(
        self,
        func: torch._ops.OpOverload,
        args: Sequence,
        kwargs: dict,
        read: list,
        out: object,
    ) -> tuple[float, float]:
        packet = func.overloadpacket
        if packet in flop_registry or packet in ATTENTION:
            dtype = read[0].dtype if read else torch.float32
            peak, _ = self._peak(packet, dtype)
            self.flops[self.clock.phase(), peak] += _count(packet, args, kwargs, out)
        return super().seconds(func, args, kwargs, read, out)


def _count(
    packet: torch._ops.OpOverloadPacket, args: Sequence, kwargs: dict, out: object
) -> float:
    if packet in ATTENTION:
        return attention.flops(packet, args) * (2 if attention.is_causal(packet, args) else 1)
    return flop_registry[packet](*args, **kwargs, out_val=out)
