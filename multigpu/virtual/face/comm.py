"""DataParallel's copies by the names of CUDA: torch.cuda.comm.

What processes need is elsewhere: a fork before the first use (sim/machine.py), shared memory
(ops/storage.py), and tensors that are sent to another process (patches/sharing.py).
"""

from multigpu.virtual.patches import comm
from multigpu.virtual.patches.replacing import Replacement, Row

ROWS: tuple[Row, ...] = tuple(
    Replacement(
        "torch.cuda.comm",
        function.__name__,
        comm.for_virtual_gpus(function),
        "DataParallel's copies: torch's own are written in C++, for CUDA and NCCL",
    )
    for function in comm.FUNCTIONS
)
