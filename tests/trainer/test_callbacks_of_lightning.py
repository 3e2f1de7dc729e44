"""Callbacks that people import: each does what Lightning's does, side by side."""

import plain_net
import pytest
import torch
from torch.utils.data import DataLoader

import multigpu.trainer as ours

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_model_summary_says_how_deep_the_table_goes(tmp_path, capsys):
    class Deep(plain_net.Net):
        def __init__(self):
            super().__init__()
            self.part = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1)))

    for depth, shown in ((0, False), (1, False), (3, True)):
        summary = ours.callbacks.ModelSummary(max_depth=depth)
        run = plain_net.trainer(tmp_path, callbacks=[summary], enable_model_summary=True)
        run.fit(Deep(), DataLoader(plain_net.rows(), 4))
        printed = capsys.readouterr().out
        assert ("part.0.0" in printed) == shown
        assert ("Total params" in printed) == (depth > 0)
