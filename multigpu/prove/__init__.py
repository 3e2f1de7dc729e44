"""Does a parallel training program compute what one GPU computes? `multigpu prove`.

    from multigpu import prove
    proof = prove.run("torchrun --nproc-per-node=2 train.py")
    print(proof)

README.md in this folder says how it works.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multigpu.prove.proof import Proof as Proof
    from multigpu.prove.session import run as run


def __getattr__(name: str) -> Any:
    # The processes of a run import this package at their start: it imports nothing then.
    if name == "run":
        from multigpu.prove.session import run

        return run
    if name == "Proof":
        from multigpu.prove.proof import Proof

        return Proof
    raise AttributeError(f"module 'multigpu.prove' has no attribute {name!r}")
