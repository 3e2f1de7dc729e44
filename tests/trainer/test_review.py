"""Ranks, parts of a batch, checkpoints and signals: each test is for a past bug."""

import os
import signal

import pytest
import torch
import torch.nn.functional as F
from small_net import QUIET, Net, cpu, make_net, rows
from torch.utils.data import DataLoader, SubsetRandomSampler

import multigpu.trainer as L
from multigpu import launch
from multigpu.errors import UserError
from multigpu.strategies import BaguaStrategy, HorovodStrategy
from multigpu.trainer.loops.dataloaders import shard_loader


def on_two_ranks(folder: str) -> dict:
    found = {}
    model = make_net(norm=True)
    trainer = cpu(
        strategy="ddp"
    )  # one validation batch: rank 1 has none, and there are buffers
    trainer.fit(model, DataLoader(rows(8), 2, shuffle=True), DataLoader(rows(3), 3))
    found["validated"] = float(trainer.callback_metrics["v"])
    model = make_net(manual=True)
    cpu(strategy=HorovodStrategy()).fit(model, DataLoader(rows(16), 2, shuffle=True))
    found["horovod, clipped by hand"] = model.layer[0].weight.detach().flatten()

    class Collective(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["ranks"] = float(self.trainer.strategy.reduce(torch.ones(1), "sum"))

    trainer = cpu(strategy="ddp")
    trainer.fit(Collective(), DataLoader(rows(8), 2))
    trainer.save_checkpoint(f"{folder}/mine.ckpt")
    found["saved by"] = torch.load(f"{folder}/mine.ckpt")["ranks"]
    torch.manual_seed(launch.find_world().rank)  # the ranks' random states are apart
    sharded = shard_loader(
        DataLoader(rows(16), 2, sampler=SubsetRandomSampler(range(16))),
        (2, launch.find_world().rank),
        training=False,
    )
    before = torch.get_rng_state()
    found["evaluated"] = [index for batch in sharded.batch_sampler for index in batch]
    found["its draws are nobody else's"] = torch.equal(before, torch.get_rng_state())
    strategy = BaguaStrategy("async", sync_interval_ms=0, warmup_steps=1)
    trainer = cpu(strategy=strategy)
    trainer.validate(make_net(), DataLoader(rows(4), 2), verbose=False)
    for _ in range(2):
        trainer.max_epochs += 2
        trainer.fit(make_net(), DataLoader(rows(64), 1))
        found.setdefault("averaging_rounds", []).append(strategy.algorithm.averaging_rounds)
    strategy = BaguaStrategy("async", sync_interval_ms=10**6, warmup_steps=2)
    model = make_net(manual=True)
    strategy.algorithm._start = lambda: found.setdefault(
        "at the end of the warm-up", weights_of(model)
    )
    cpu(strategy=strategy).fit(model, DataLoader(rows(16), 2, shuffle=True))
    found["long after it"] = weights_of(model)
    rates: list = []

    class Cycle(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(
                lambda *_: rates.append(optimizer.param_groups[0]["lr"])
            )
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.1, total_steps=8
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    for strategy in ("ddp", "horovod"):
        rates.clear()
        cpu(strategy=strategy).fit(Cycle(), DataLoader(rows(16), 1))
        found[f"rates of {strategy}"] = list(rates)
    return found


def weights_of(model: Net) -> torch.Tensor:
    return model.layer[0].weight.detach().clone().flatten()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch.call(on_two_ranks, 2, str(tmp_path_factory.mktemp("two")))


def test_a_rank_without_a_validation_batch_is_not_waited_for(two):
    assert two[0]["validated"] == two[1]["validated"]


def test_horovods_gradients_are_averaged_before_they_are_clipped_by_hand(two):
    assert torch.equal(*(rank["horovod, clipped by hand"] for rank in two))


def test_a_hook_may_hold_a_collective_while_a_checkpoint_is_made(two):
    assert two[0]["saved by"] == 2.0


def test_a_random_sampler_of_the_users_gives_each_row_once_in_an_evaluation(two):
    assert sorted(two[0]["evaluated"] + two[1]["evaluated"]) == list(range(16))
    assert two[0]["its draws are nobody else's"]


def test_asynchronous_averages_begin_again_with_each_fit(two):
    first, second = two[0]["averaging_rounds"]
    assert 0 < first < second


def test_after_an_asynchronous_warm_up_ranks_are_on_their_own_in_manual_optimization_too(two):
    first, second = two
    assert torch.equal(first["at the end of the warm-up"], second["at the end of the warm-up"])
    assert not torch.equal(first["long after it"], second["long after it"])


def test_horovod_scales_a_one_cycle_schedule_as_a_whole(two):
    assert two[0]["rates of horovod"] == pytest.approx(
        [2 * rate for rate in two[0]["rates of ddp"]]
    )
    assert len(two[0]["rates of ddp"]) == 8


def test_after_a_run_the_model_is_on_the_cpu_without_a_wrapper(request):
    from multigpu import vgpu

    request.addfinalizer(vgpu.stop)
    vgpu.start(2)
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
    from multigpu import vgpu

    request.addfinalizer(vgpu.stop)
    vgpu.start(1, compute=False)
    model = make_net()
    model.training_step = lambda batch, batch_idx: F.cross_entropy(model(batch[0]), batch[1])
    cpu(accelerator="vgpu", devices=1, detect_anomaly=False).fit(model, DataLoader(rows(8), 4))
    assert next(model.parameters()).device.type == "vgpu"


def test_predict_with_a_progress_bar():
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert len(trainer.predict(make_net(), DataLoader(rows(4).tensors[0], 2))) == 2
    assert trainer.num_predict_batches == [2]


@pytest.mark.parametrize(("strategy", "devices"), [("dp", 4), ("pipeline", 2)])
def test_what_pieces_log_counts_by_their_rows(strategy, devices, request):
    from multigpu import vgpu

    request.addfinalizer(vgpu.stop)

    class Staged(Net):
        def pipeline_stages(self):
            return [self.layer[0], self.layer[1]]

        def training_step(self, batch, batch_idx):
            logits = self(batch[0])
            loss = F.cross_entropy(logits, batch[1].to(logits.device))
            self.log("l", loss, on_step=True, on_epoch=True)
            return loss * 0.0  # so that validation sees the first weights

    def reported(**keywords) -> tuple:
        torch.manual_seed(0)
        module = Staged()
        module.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
        trainer = L.Trainer(**{"max_epochs": 1, **QUIET, **keywords})
        trainer.fit(module, DataLoader(rows(10), 10), DataLoader(rows(10), 10))
        return tuple(
            float(trainer.callback_metrics[name]) for name in ("l_step", "l_epoch", "v")
        )

    if strategy == "pipeline":
        Staged.validation_step = lambda self, batch, i: self.log(
            "v", F.cross_entropy(self(batch[0]).cpu(), batch[1].cpu())
        )
    one = reported(accelerator="cpu")
    assert reported(accelerator="vgpu", devices=devices, strategy=strategy) == pytest.approx(
        one, abs=1e-5
    )


@pytest.mark.parametrize("strategy", ["dp", "ddp2", "pipeline"])
def test_manual_optimization_is_refused_where_a_step_runs_in_pieces(strategy, request):
    from multigpu import vgpu

    request.addfinalizer(vgpu.stop)
    Net.pipeline_stages = lambda self: [self.layer[0], torch.nn.Identity()]
    with pytest.raises(
        UserError, match=r"manual optimization .*automatic optimization, or strategy='ddp'"
    ):
        L.Trainer(accelerator="vgpu", devices=2, strategy=strategy, **QUIET).fit(
            make_net(manual=True), DataLoader(rows(4), 4)
        )
    del Net.pipeline_stages


def test_a_sigterm_outside_of_training_is_not_swallowed_and_none_is_kept():
    before = signal.getsignal(signal.SIGTERM)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    try:
        trainer = cpu()
        model = make_net()
        model.on_test_start = lambda: os.kill(os.getpid(), signal.SIGTERM)
        trainer.test(model, DataLoader(rows(4), 2), verbose=False)
        assert asked == [1] and not trainer.received_sigterm
        trainer.fit(model, DataLoader(rows(4), 2))
        assert trainer.global_step == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_should_stop_and_metrics_do_not_outlive_a_run():
    trainer, model = cpu(), make_net()
    trainer.fit(model, DataLoader(rows(4), 2))
    trainer.should_stop, trainer.max_epochs = True, 2
    trainer.fit(model, DataLoader(rows(4), 2))
    assert trainer.global_step == 4
    trainer.test(model, DataLoader(rows(4), 2), verbose=False)
    assert set(trainer.callback_metrics) == {"v"}


def test_test_without_a_model_takes_the_best_checkpoint(tmp_path):
    saver = L.callbacks.ModelCheckpoint(
        tmp_path, monitor="v", mode="max"
    )  # the worst: surely not the last
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=4,
        callbacks=[saver],
        **{**QUIET, "enable_checkpointing": True},
    )
    trainer.fit(make_net(), DataLoader(rows(12), 4), DataLoader(rows(12), 4))
    assert trainer.test(dataloaders=DataLoader(rows(12), 4), verbose=False)[0][
        "v"
    ] == pytest.approx(float(saver.best_model_score), abs=1e-6)


def test_a_modules_own_callbacks_are_all_kept_and_checkpoints_come_last(tmp_path):
    model = make_net()
    mine = [L.callbacks.ModelCheckpoint(tmp_path / name, every_n_epochs=1) for name in "ab"]
    model.configure_callbacks = lambda: [*mine, L.callbacks.EarlyStopping("l")]
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, **{**QUIET, "enable_checkpointing": True}
    )
    trainer.fit(model, DataLoader(rows(4), 2))
    assert trainer.callbacks[-2:] == mine


def test_a_batch_without_a_loss_is_skipped_with_a_scaler_too(request):
    from multigpu import vgpu

    request.addfinalizer(vgpu.stop)
    model = make_net()
    model.training_step = lambda batch, i: (
        None if i == 0 else F.cross_entropy(model(batch[0]), batch[1])
    )
    with pytest.warns(UserWarning, match="returned nothing"):
        L.Trainer(accelerator="vgpu", precision=16, max_epochs=1, **QUIET).fit(
            model, DataLoader(rows(6), 2)
        )


def test_an_endless_loader_has_endless_steps():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from rows(4)

    model, found = make_net(), []
    model.on_train_start = lambda: found.append(model.trainer.estimated_stepping_batches)
    cpu(max_epochs=1).fit(model, DataLoader(Endless(), 2))
    assert found == [float("inf")]
    assert cpu(fast_dev_run=True, check_val_every_n_epoch=5).check_val_every_n_epoch == 1
