"""Errors and warnings name what this Trainer does not support, and what to do instead."""

from types import SimpleNamespace

import pytest
import torch
from small_net import cpu, make_net, rows
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu import vgpu
from multigpu.errors import UserError


def test_a_compiled_module_is_refused_with_a_way_out():
    with pytest.raises(UserError, match=r"compile its layers.*torch\.compile"):
        cpu().fit(torch.compile(make_net()), DataLoader(rows(8), 2))


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (L.callbacks, "RichProgressBar", "TQDMProgressBar"),
        (L.loggers, "WandbLogger", "CSVLogger or TensorBoardLogger"),
    ],
)
def test_what_is_not_here_says_what_is(module, name, expected):
    with pytest.raises(UserError, match=f"{name}.*{expected}"):
        getattr(module, name)
    with pytest.raises(AttributeError, match="'Nonsense'"):
        _ = module.Nonsense


def test_the_names_of_lightning_s_modules():
    from multigpu.trainer.strategies import DDPStrategy

    from multigpu.trainer.utilities import rank_zero_only

    assert DDPStrategy is L.strategies.DDPStrategy and rank_zero_only(lambda x: x + 1)(1) == 2


def test_nothing_to_validate_with_is_said():
    with pytest.warns(UserWarning, match=r"validation_step.* no validation dataloaders"):
        cpu().fit(make_net(), DataLoader(rows(8), 2))


def test_bfloat16_on_an_old_virtual_gpu_names_another(request):
    request.addfinalizer(vgpu.stop)
    with pytest.raises(
        UserError, match=r"precision='16-mixed'.*vgpu.start\(1, gpu='A100-40GB'\)"
    ):
        cpu(accelerator="vgpu", precision="bf16", devices=1).fit(
            make_net(), DataLoader(rows(8), 2)
        )


def test_fewer_batches_than_ranks_is_said(monkeypatch):
    from multigpu.trainer.loops.dataloaders import shard_loader

    with pytest.warns(UserWarning, match=r"1 batch .*2 ranks.*smaller batch_size"):
        shard_loader(DataLoader(rows(4), 4), (2, 0), training=False)
    lengthless = DataLoader(
        rows(4), batch_sampler=SimpleNamespace(__iter__=lambda: iter([[0]]))
    )
    with pytest.raises(UserError, match=r"batch_sampler has no length.* 2 ranks.*__len__"):
        shard_loader(lengthless, (2, 0), training=False)
