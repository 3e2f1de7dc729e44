"""The command-line flags that every lesson's script has, and how they are checked."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from multigpu.data import Batch
from multigpu.errors import UserError, pluralize, wait_for_launcher
from multigpu.launch.world import is_rank_zero

# Larger numbers are typing errors, and overflow inside torch.
MOST = 2**31 - 1
MOST_SEED = 2**32 - 1


class Parser(argparse.ArgumentParser):
    """A parser that prints errors on rank 0 only, because all ranks get the same flags."""

    def parse_args(self, *args, **kwargs) -> argparse.Namespace:
        """Parse the flags as argparse does; refuse --prove together with --amp."""
        parsed = super().parse_args(*args, **kwargs)
        if parsed.prove and getattr(parsed, "amp", False):
            self.error(
                "--prove compares runs in 32 bit, --amp computes in 16: leave one of them out"
            )
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the error on rank 0 and exit with code 2."""
        if not is_rank_zero():
            wait_for_launcher()
            sys.exit(2)
        hint = "--help lists the flags"
        if "SLURM_JOB_ID" in os.environ and message.startswith("unrecognized"):
            hint += "; options of sbatch go before the job file's name"
        self.exit(2, f"error: {message} ({hint})\n")


def parser(
    stem: str,
    description: str,
    *,
    batch_size_help: str = (
        "global batch, split over all ranks (default: 64, rounded up to split evenly)"
    ),
    prove_help: str = "train serially too, and compare the weights",
) -> Parser:
    """A parser with --epochs --batch-size --lr --seed --data --out --prove.

    The lesson adds its own flags to it. Results go to results/`stem` by default. The texts
    say what a script does that splits a batch, or proves, in another way.
    """
    lesson_parser = Parser(description=description, allow_abbrev=False)
    flag = lesson_parser.add_argument
    flag(
        "--epochs",
        type=positive,
        default=10,
        help="passes over the training images (default: 10)",
    )
    flag("--batch-size", type=positive, help=batch_size_help)
    flag("--lr", type=positive_float, default=0.05, help="learning rate (default: 0.05)")
    flag(
        "--seed",
        type=seed,
        default=0,
        help="seed of the weights and of the order of the images (default: 0)",
    )
    flag(
        "--data",
        help=".npz with x_train, y_train, x_test, y_test, or its URL (default: the digits)",
    )
    flag(
        "--out",
        type=Path,
        default=Path("results") / stem,
        help=f"folder for results (default: results/{stem})",
    )
    flag("--prove", action="store_true", help=prove_help)
    return lesson_parser


def positive(text: str) -> int:
    """A whole number from 1 to MOST."""
    number = count(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return number


def count(text: str) -> int:
    """A whole number from 0 to MOST."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return _at_most(MOST, text)


def seed(text: str) -> int:
    """A whole number from −MOST_SEED to MOST_SEED."""
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return _at_most(MOST_SEED, text)


def _at_most(most: int, text: str) -> int:
    """A whole number from −most to most. Raises ArgumentTypeError for another one."""
    # Python refuses to convert thousands of digits.
    if len(text) > 20 or abs(int(text)) > most:
        shown = text if len(text) <= 20 else f"{text[:20]}…"
        hint = f"too large: give at most {most}"
        if text.startswith("-"):
            hint = f"too small: give at least {-most}"
        raise argparse.ArgumentTypeError(f"{shown!r} is {hint}")
    return int(text)


def positive_float(text: str) -> float:
    """A number greater than 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number greater than 0")
    return number


def split_batch(
    batch_size: int | None, ranks: int, micro_batches: int = 1, who: str = "rank"
) -> Batch:
    """Split `--batch-size` evenly over ranks and micro-batches.

    Without `--batch-size` the global batch is 64, rounded up to a size that splits evenly.
    Raises UserError if the given size does not split evenly. `who` is the message's word for a
    rank, such as "replica".
    """
    parts = ranks * micro_batches
    size = -(-64 // parts) * parts if batch_size is None else batch_size
    if size % parts:
        near = max(1, round(size / parts)) * parts
        over = pluralize(ranks, who)
        if micro_batches > 1:
            # A pipeline has several ranks, but does not split the batch over them.
            over = f"{over} × " if ranks > 1 else ""
            over += f"{micro_batches} micro-batches"
        raise UserError(
            f"--batch-size {size} cannot be split evenly over {over}: "
            f"give {near}, or another multiple of {parts}."
        )
    return Batch(size, ranks, micro_batches, size // parts)
