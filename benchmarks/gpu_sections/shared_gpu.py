"""Section: two ranks that share one GPU, over gloo: DDP equals one process, and collectives.

NCCL refuses two ranks on one GPU; gloo copies through the host.
"""

import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import ddp_difference, try_collectives
from section import Section, main

from multigpu import launch
from multigpu.errors import UserError
from multigpu.files import write_json

RANKS = 2
LIMIT = 1e-5


def rank_main(kind: str, out: str) -> None:
    """What each of the ranks does; rank 0 writes the rows."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    rows = []
    for name in ("cnn", "gpt"):
        difference = ddp_difference(name, 8, device)
        held = difference <= LIMIT
        rows.append({"case": f"DDP, {name}", "ok": held, "difference": difference})
    # Written now, too: a collective that gloo lacks can stop the ranks.
    if rank == 0:
        write_json(out, rows)
    rows += try_collectives(device)
    if rank == 0:
        write_json(out, rows)
    dist.barrier()
    dist.destroy_process_group()


def real(section: Section) -> None:
    with section.item("two ranks over gloo"), tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        try:
            launch.call(rank_main, RANKS, section.device.type, str(out))
            failure = None
        except (RuntimeError, UserError) as error:
            failure = error
        for row in json.loads(out.read_text()) if out.exists() else ():
            # Which collectives gloo has for tensors on a GPU is a finding, not a failure.
            section.row(**(row | {"ok": None} if "error" in row else row))
        if failure:
            raise failure


if __name__ == "__main__":
    main(real)
