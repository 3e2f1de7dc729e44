"""Right programs of all kinds hold: right_cases.py has them, right/ the programs.

`make test` proves one program for each way in which parameters lie on ranks, here or in
tests/lessons (a pipeline, a layer on two ranks); with ALL_PROOFS=1, `make test-prove`, all.
Those of Accelerate and transformers need these packages.
"""

import importlib.util
import os
import shlex
from pathlib import Path

import pytest
import right_cases
from right_cases import Right

from multigpu import prove

ALWAYS = (
    "data_parallel",
    "augmented",
    "optimizer_reduces",
    "contrast_queue",
    "fsdp1_wrap",
    "fsdp2_bf16",
)
ALL = bool(os.environ.get("ALL_PROOFS"))
CHOSEN = [case for case in right_cases.CASES if ALL or case.name in ALWAYS]


@pytest.mark.slow
@pytest.mark.parametrize("case", CHOSEN, ids=[case.name for case in CHOSEN])
def test_a_right_program_holds(
    case: Right, in_forks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = (case.needs or "").split()
    if "hf" in needs and not importlib.util.find_spec("accelerate"):
        pytest.skip("needs accelerate and transformers, which the course does not install")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(right_cases.FOLDER.parents[2]))
    for path in right_cases.FOLDER.glob("*.py"):
        (tmp_path / path.name).symlink_to(path)
    proof = prove.run(
        _local(case.command),
        gpus=case.gpus or (2 if "virtual" in needs else None),
        reference=case.reference,
        against=case.against,
        no_dropout=case.no_dropout,
        timeout=100,
    )
    assert proof.verdict == "holds", str(proof)


def _local(command: str) -> list[str]:
    """The command's words; torchrun does not look up the machine's name."""
    words = shlex.split(command)
    if words[0] == "torchrun":
        words.insert(1, "--local-addr=127.0.0.1")
    return words


def test_all_chosen_exist() -> None:
    assert set(ALWAYS) <= {case.name for case in right_cases.CASES}
