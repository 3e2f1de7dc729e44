"""What a run leaves behind, and another run of the same model or Trainer."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from refusals import outcome
from small_net import Net, cpu, fitted, make_net, rows
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from multigpu import launch
from multigpu.errors import UserError
from multigpu.strategies import BaguaStrategy
from multigpu.virtual import control


def test_after_a_run_the_model_is_on_the_cpu_without_a_wrapper(request):
    request.addfinalizer(control.stop)
    control.start(2)
    for strategy, devices in (("dp", 2), ("auto", 1)):
        model, trainer = (
            make_net(),
            cpu(accelerator="vgpu", strategy=strategy, devices=devices),
        )
        model.configure_optimizers = lambda model=model: torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9
        )
        trainer.fit(model, DataLoader(rows(8), 4))
        assert {p.device.type for p in model.parameters()} == {
            "cpu"
        } and trainer.model is model
        assert {
            v.device.type for s in trainer.optimizers[0].state.values() for v in s.values()
        } == {"cpu"}
        trainer.test(model, DataLoader(rows(8), 4), verbose=False)
        trainer.fit(model, DataLoader(rows(8), 4))


def test_a_run_by_shapes_alone_leaves_the_model_where_it_is(request):
    request.addfinalizer(control.stop)
    control.start(1, compute=False)
    model = make_net()
    model.training_step = lambda batch, batch_idx: F.cross_entropy(model(batch[0]), batch[1])
    cpu(accelerator="vgpu", devices=1).fit(model, DataLoader(rows(8), 4))
    assert next(model.parameters()).device.type == "vgpu"


def test_should_stop_and_metrics_do_not_outlive_a_run():
    trainer, model = cpu(), make_net()
    trainer.fit(model, DataLoader(rows(4), 2))
    trainer.should_stop, trainer.max_epochs = True, 2
    trainer.fit(model, DataLoader(rows(4), 2))
    assert trainer.global_step == 4
    trainer.test(model, DataLoader(rows(4), 2), verbose=False)
    assert set(trainer.callback_metrics) == {"v"}


def test_a_stop_in_on_fit_start_is_kept():
    class Stops(Net):
        def on_fit_start(self):
            self.trainer.should_stop = True

    assert fitted(Stops()).global_step == 0


def test_after_a_failed_step_log_has_no_hook_to_log_in():
    model = make_net()
    model.training_step = lambda batch, i: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fitted(model)
    with pytest.raises(UserError, match="outside of the steps"):
        model.log("later", 1.0)


def test_after_a_failed_ddp_spawn_the_trainer_still_has_its_model():
    model = make_net()
    loader = DataLoader(rows(4), 2)
    trainer = cpu(strategy="ddp_spawn", devices=2, max_steps=1)
    trainer.fit(model, loader)
    with pytest.raises(UserError):
        trainer.validate(dataloaders=loader, ckpt_path="missing.ckpt")
    assert trainer.lightning_module is model
    assert trainer.validate(dataloaders=loader, verbose=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_warns(monkeypatch, rank):
    state = cpu().state
    monkeypatch.setenv("RANK", str(rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state.warn_once("a warning")
        state.warn_once("a warning")
    assert len(caught) == 1 - rank


def fails_at(step: int) -> Net:
    model = make_net()
    model.training_step = lambda batch, i: (
        F.cross_entropy(model(batch[0]), batch[1]) * (1 // (i - step))
    )
    return model


def on_two_ranks() -> dict:
    found: dict = {}
    model = make_net()
    for _ in range(2):
        cpu(strategy="horovod").fit(model, DataLoader(rows(16), 2))
    found["twice"] = model.layer[0].weight.detach().flatten()

    trainers = []
    for _ in range(2):
        trainers.append(cpu(strategy="ddp"))
        trainers[-1].fit(make_net(manual=True), DataLoader(rows(8), 2))
    gc.collect()
    found["wrappers"] = sum(
        isinstance(thing, DistributedDataParallel) for thing in gc.get_objects()
    )

    strategy = BaguaStrategy("async", sync_interval_ms=1)
    trainer = cpu(strategy=strategy)
    trainer.validate(make_net(), DataLoader(rows(4), 2), verbose=False)
    for _ in range(2):
        trainer.max_epochs += 2
        trainer.fit(make_net(), DataLoader(rows(64), 1))
        found.setdefault("averaging_rounds", []).append(strategy.algorithm.averaging_rounds)

    train = DataLoader(rows(8), 2)
    for name, strategy in (
        ("async", BaguaStrategy("async", sync_interval_ms=20)),
        ("horovod", "horovod"),
    ):
        failed = outcome(
            lambda strategy=strategy: cpu(strategy=strategy).fit(fails_at(1), train)
        )
        again = outcome(
            lambda strategy=strategy: cpu(strategy=strategy).fit(make_net(), train)
        )
        found[name] = (failed, again)
    return found


@pytest.fixture(scope="module")
def two():
    return launch.call(on_two_ranks, 2)


def test_horovod_may_train_a_model_again(two):
    assert torch.equal(*(rank["twice"] for rank in two))


def test_after_manual_optimization_no_wrapper_lives_on(two):
    assert two[0]["wrappers"] == 0


def test_asynchronous_averages_begin_again_with_each_fit(two):
    first, second = two[0]["averaging_rounds"]
    assert 0 < first < second


@pytest.mark.parametrize("strategy", ["async", "horovod"])
def test_after_a_failure_another_fit_may_begin(two, strategy):
    assert two[0][strategy] == (
        "ZeroDivisionError: integer division or modulo by zero",
        "nothing",
    )
