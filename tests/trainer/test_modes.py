"""Modes that a run sets: determinism, inference mode, training and evaluation."""

import pytest
import torch
from numbered_rows import Net, Rows, ran, trainer
from torch.utils.data import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore")


def test_deterministic_is_set_in_torch(tmp_path):
    try:
        ran(tmp_path, deterministic=True, fast_dev_run=True)
        assert torch.are_deterministic_algorithms_enabled()
        ran(tmp_path, deterministic="warn", fast_dev_run=True)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("inference", [True, False])
def test_evaluation_keeps_no_graph_and_inference_mode_only_where_wanted(tmp_path, inference):
    reported = []
    net = Net(
        val=lambda net, *_: reported.append(
            (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), net.training)
        )
    )
    trainer(tmp_path, inference_mode=inference).validate(
        net.train(), DataLoader(Rows(2)), verbose=False
    )
    assert reported == [(inference, False, False)] * 2 and net.training


def test_evaluation_leaves_a_frozen_parts_mode_alone(tmp_path):
    net = Net()
    net.layer.eval()
    ran(tmp_path, net)
    assert net.training and not net.layer.training
