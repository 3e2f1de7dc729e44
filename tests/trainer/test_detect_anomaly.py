"""detect_anomaly=True names the first step and tensor that is not finite."""

import pytest
import torch
from numbered_rows import changed, fit
from refusals import names
from torch.utils.data import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore")


def broken(self, batch, i):
    loss = self.layer(batch).mean()
    return loss * (float("nan") if i == 2 else 1.0)


def root(self, batch, i):
    """0, where the square root's slope is infinite."""
    zero = self.layer(batch * 0).mean() - self.layer.bias.detach()
    return zero.abs().sqrt().sum()


def spoil_weight(self):
    self.layer.weight.data.fill_(float("nan"))


INFINITE = DataLoader([torch.ones(1), torch.full((1,), float("inf"))])


# case → (the module's methods, fit's arguments, what the error names)
ANOMALIES = {
    "the loss": ({"training_step": broken}, {}, ("step 2 (epoch 0)", "the loss")),
    "a gradient": ({"training_step": root}, {}, ("step 0 (epoch 0)", "gradient of 'layer.")),
    "the batch": ({}, {"loader": INFINITE}, ("step 1 (epoch 0)", "the batch's tensor 0")),
    "a weight": ({"on_train_start": spoil_weight}, {}, ("the weight 'layer.weight'",)),
}


@pytest.mark.parametrize("case", ANOMALIES)
def test_detect_anomaly_names_the_step_and_the_tensor(tmp_path, case):
    methods, keywords, facts = ANOMALIES[case]
    names(lambda: fit(tmp_path, changed(**methods), **keywords, detect_anomaly=True), *facts)
    fit(tmp_path, changed(**methods), **keywords)  # without it nothing is checked


def skips(self, batch, i):
    return None if i == 2 else self.layer(batch).mean()


def test_with_detect_anomaly_no_batch_is_skipped(tmp_path):
    net = changed(training_step=skips)
    names(
        lambda: fit(tmp_path, net, detect_anomaly=True),
        "returned nothing in step 2 (batch 2 of epoch 0)",
        "return the loss",
        "detect_anomaly",
    )
    fit(tmp_path, changed(training_step=skips))
