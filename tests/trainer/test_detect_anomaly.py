"""detect_anomaly=True is torch's own check, as in Lightning."""

import pytest
import torch
from numbered_rows import changed, fit

pytestmark = pytest.mark.filterwarnings("ignore")


def root(self, batch, i):
    """The root of 0, whose slope is infinite, times 0: the gradient is not a number."""
    zero = self.layer(batch * 0).mean() - self.layer.bias.detach()
    return (zero.abs().sqrt() * 0).sum()


def test_detect_anomaly_names_the_operation_whose_gradient_is_nan(tmp_path):
    with pytest.raises(RuntimeError, match=r"SqrtBackward0.*nan"):
        fit(tmp_path, changed(training_step=root), detect_anomaly=True)
    assert not torch.is_anomaly_enabled()
    fit(tmp_path, changed(training_step=root))  # without it nothing is checked
