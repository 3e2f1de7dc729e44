"""Modes that a run sets: determinism, inference mode, training and evaluation."""

import pytest
import torch
from numbered_rows import Net, Rows, changed, fit, ran, trainer
from torch.utils.data import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore")


def test_deterministic_and_benchmark_are_set_in_torch(tmp_path):
    before = torch.backends.cudnn.benchmark
    try:
        ran(tmp_path, deterministic=True, benchmark=True, fast_dev_run=True)
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark
        ran(tmp_path, deterministic="warn", benchmark=False, fast_dev_run=True)
        assert (
            torch.is_deterministic_algorithms_warn_only_enabled()
            and not torch.backends.cudnn.benchmark
        )
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = before


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
    with pytest.warns(UserWarning, match="starts with 1 module in eval mode"):
        ran(tmp_path, net)
    assert net.training and not net.layer.training


def root(self, batch, i):
    """The root of 0, whose slope is infinite, times 0: the gradient is not a number."""
    zero = self.layer(batch * 0).mean() - self.layer.bias.detach()
    return (zero.abs().sqrt() * 0).sum()


def test_detect_anomaly_names_the_operation_whose_gradient_is_nan(tmp_path):
    with pytest.raises(RuntimeError, match=r"SqrtBackward0.*nan"):
        fit(tmp_path, changed(training_step=root), detect_anomaly=True)
    assert not torch.is_anomaly_enabled()
    fit(tmp_path, changed(training_step=root))  # without it nothing is checked
