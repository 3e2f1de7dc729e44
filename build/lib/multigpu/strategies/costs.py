"""Formulas for the bytes that each strategy sends, for N float32 weights and n ranks.

    operation                                    bytes per step and rank
    ring all-reduce                              8N(n−1)/n: 2(n−1) sends of N/n numbers
    exchange with one other rank                 4N
    one byte per weight, to two neighbours       2(N + 8): 8 for a message's min and max
    one byte per weight, through chunk owners    2(n−1)(N/n + 8)

The transport adds its own bytes: gloo puts a header before each message.
"""

from multigpu.errors import UserError

ONE_PROCESS = ("dp", "pipeline")


def predicted_bytes(name: str, weights: int, ranks: int) -> float:
    """The bytes that one rank sends through the network per step.

    For bagua:async the result is per averaging round. For bagua:qadam it is per step after the
    warm-up. For ddp2, `ranks` is the number of nodes. `name` is a name that `strategy_by_name`
    accepts. Raises UserError for "shift_one" with an odd number of ranks above 1, which cannot
    be paired.
    """
    if ranks == 1 or name in ONE_PROCESS:
        return 0.0
    if name in ("bagua:bytegrad", "bagua:qadam"):
        return 2.0 * (ranks - 1) * (-(-weights // ranks) + 8)
    if name == "bagua:low_precision_decentralized":
        return 2.0 * (weights + 8)
    if name.endswith(":shift_one"):
        if ranks % 2:
            raise UserError(
                f"'shift_one' pairs the ranks, and {ranks} is odd: give an even number."
            )
        return 4.0 * weights
    return 8 * weights * (ranks - 1) / ranks
