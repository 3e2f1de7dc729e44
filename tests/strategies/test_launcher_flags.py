"""A launcher that started another number of ranks than asked for: the error names the flag."""

import pytest
from ranked import user_error

from multigpu.strategies import DDPStrategy
from multigpu.strategies.accelerators import resolve

RANKS = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "run", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("nodes", "devices", "flag"),
    [
        # torchrun takes the ranks of one node, on however many nodes it runs.
        (2, 3, "--nproc-per-node=3'"),
        (3, 2, "--nnodes=3'"),
    ],
)
def test_torchrun_on_two_nodes(monkeypatch, nodes, devices, flag):
    variables = RANKS | TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    strategy = DDPStrategy()
    strategy.configure(resolve("cpu", devices), nodes)
    message = user_error(strategy.connect)
    assert "torchrun started" in message and flag in message
