"""Section: NCCL with one rank: each collective is right, and DDP equals a plain step."""

import torch
import torch.distributed as dist
from ranks import ddp_difference, try_collectives
from section import Section, main
from timing import step_times

from multigpu import devices

LIMIT = 1e-6
# An all-reduce of one rank is a copy at most: what it takes is the cost of its launch.
NUMBERS = (1, 2**20, 2**26)


def real(section: Section) -> None:
    backend = devices.backend(section.device)
    if backend == "nccl" and not dist.is_nccl_available():
        section.skip("NCCL", f"torch {torch.__version__} was built without it")
        return
    with section.item(f"starting {backend}"):
        own = section.device if backend == "nccl" else None
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, device_id=own
        )
        try:
            for row in try_collectives(section.device):
                section.row(**row)
            for name in ("cnn", "gpt"):
                difference = ddp_difference(name, 4, section.device)
                held = difference <= LIMIT
                section.row(case=f"DDP, {name}", ok=held, difference=difference)
            for numbers in NUMBERS[: 1 if section.quick else None]:
                x = torch.ones(numbers, device=section.device)
                times = step_times(lambda x=x: dist.all_reduce(x), section.device, 0.1)
                section.row(
                    case=f"all_reduce of {numbers:,} numbers", measured=times.as_dict()
                )
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main(real)
