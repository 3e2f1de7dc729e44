"""Lesson 05: the program with DDP in plain torch, with which it opens."""

import re

from commands import ROOT, run

PLAIN = ROOT / "lessons" / "05-ddp-cluster" / "plain_ddp.py"


def test_plain_ddp_trains_on_two_ranks():
    # Really started: plain torch does not end gloo's threads as multigpu/launch/exit.py does.
    command = (
        "torchrun",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=2",
        PLAIN,
    )
    done = run(*command)
    if "terminate called without an active exception" in done.stdout:
        done = run(*command)  # pytorch/pytorch#190489, in about one run of a hundred
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("2 ranks") == 1, "rank 0 alone prints"
    assert float(re.search(r"test accuracy (\S+)", done.stdout)[1]) > 0.85


def test_plain_ddp_uses_nothing_of_the_course():
    assert "multigpu" not in PLAIN.read_text()
