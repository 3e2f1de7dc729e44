"""Which data, learning rates and gradients each rank gets: each test is for a past bug."""

import gc
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_net import Net, cpu, make_net, rows
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

import multigpu.trainer as L
from multigpu import launch, vgpu
from multigpu.errors import UserError
from multigpu.strategies import DDPStrategy
from multigpu.trainer.loops import dataloaders

SCHEDULES = {
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.5, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 10)],
        [2],
    ),
    "lambdas": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.ConstantLR(o, 0.5, total_iters=2),
            lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        ],
        [2],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.LinearLR(o, 0.5, total_iters=2),
            lr_scheduler.CosineAnnealingLR(o, 10, eta_min=0.1),
        ]
    ),
    "with a floor": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, eta_min=0.1),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(
        o, mode="max", threshold=1e9, patience=0, min_lr=0.3
    ),
}


class Scheduled(Net):
    def __init__(self, schedule: str):
        super().__init__()
        self.schedule, self.rates = schedule, []

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(
            lambda *_: self.rates.append(optimizer.param_groups[0]["lr"])
        )
        reported = {
            "scheduler": SCHEDULES[self.schedule](optimizer),
            "interval": "step",
            "monitor": "l",
        }
        return {"optimizer": optimizer, "lr_scheduler": reported}


class TwoLayers(Net):
    """The first layer learns in those epochs for which `when` is True."""

    def __init__(self, when: dict):
        super().__init__()
        self.when, self.first = when, torch.nn.Linear(4, 4)
        self.first.requires_grad_(when.get("before", True))

    def forward(self, x):
        return super().forward(self.first(x))

    def on_train_start(self):
        self.first.requires_grad_(self.when.get("start", self.first.weight.requires_grad))

    def on_train_epoch_start(self):
        self.first.requires_grad_(
            self.when.get(self.current_epoch, self.first.weight.requires_grad)
        )


class Unbatched(Net):
    def training_step(self, batch, batch_idx):
        self.seen.append(round(float(batch[0][0]), 4))
        return F.cross_entropy(self(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        return float(batch[0][0])


class Random(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, row):
        return torch.rand(1).item(), float(np.random.rand())


def changed(when: dict, strategy: object = "ddp") -> object:
    """The first layer's weights after three epochs, or what was said of them."""
    torch.manual_seed(0)
    model = TwoLayers(when)
    try:
        cpu(strategy=strategy, max_epochs=3).fit(model, DataLoader(rows(16), 2))
    except UserError as error:
        hooks = sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters())
        return f"{error} Hooks: {hooks}."
    return model.first.weight.detach().flatten()


def drawn(**how) -> list:
    L.seed_everything(3, verbose=False, **how)
    trainer = cpu(strategy="ddp")
    trainer.strategy.connect()
    loader = DataLoader(Random(), 2, num_workers=1)
    return list(dataloaders.prepare_for_rank(trainer, loader, training=True))


def on_two_ranks() -> dict:
    found = {}
    for schedule in SCHEDULES:
        for strategy in ("ddp", "horovod"):
            model = Scheduled(schedule)
            cpu(strategy=strategy).fit(model, DataLoader(rows(16), 1))
            found[schedule, strategy] = model.rates
    model = make_net()
    for _ in range(2):
        cpu(strategy="horovod").fit(model, DataLoader(rows(16), 2))
    found["twice"] = model.layer[0].weight.detach().flatten()

    model, trainer = Unbatched(), cpu(strategy="ddp")
    trainer.fit(model, DataLoader(rows(8), batch_size=None))
    found["unbatched"], model.seen = model.seen, []
    trainer = cpu(strategy="ddp", max_epochs=2)
    trainer.fit(model, DataLoader(rows(8), batch_size=None, shuffle=True))
    found["shuffled"] = model.seen
    found["predicted"] = trainer.predict(model, DataLoader(rows(7), batch_size=None))

    trainers = []
    for _ in range(2):
        trainers.append(cpu(strategy="ddp"))
        trainers[-1].fit(make_net(manual=True), DataLoader(rows(8), 2))
    gc.collect()
    found["wrappers"] = sum(
        isinstance(thing, DistributedDataParallel) for thing in gc.get_objects()
    )

    found["thawed"] = changed({"before": False, 1: True})
    found["frozen"] = changed({1: False})
    found["frozen, and thawed"] = changed(
        {"start": False, 1: True}, DDPStrategy(find_unused_parameters=True)
    )
    found["thawed, horovod"] = changed({"before": False, 1: True}, "horovod")
    found["frozen, and thawed, horovod"] = changed({"start": False, 1: True}, "horovod")

    found["workers"], found["again"] = drawn(workers=True), drawn(workers=True)
    found["not seeded"] = drawn()
    return found


@pytest.fixture(scope="module")
def two():
    return launch.call(on_two_ranks, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_horovod_scales_a_schedule_as_a_whole(two, schedule):
    one, more = two[0][schedule, "ddp"], two[0][schedule, "horovod"]
    assert len(set(one)) > 1 and len(one) == 8
    assert more == pytest.approx([2 * rate for rate in one])


def test_horovod_may_train_a_model_again(two):
    assert torch.equal(*(rank["twice"] for rank in two))


def test_a_loader_without_batches_is_dealt_out(two):
    whole = [round(float(row[0]), 4) for row in rows(8).tensors[0]]
    assert [rank["unbatched"] for rank in two] == [whole[::2], whole[1::2]]
    first, second = (rank["shuffled"] for rank in two)
    assert sorted(first[:4] + second[:4]) == sorted(first[4:] + second[4:]) == sorted(whole)
    assert first[:4] != first[4:]


def test_a_loader_without_batches_is_predicted_once_and_in_order(two):
    for rank in two:
        assert rank["predicted"] == pytest.approx(
            [float(row[0]) for row in rows(7).tensors[0]]
        )


def test_after_manual_optimization_no_wrapper_lives_on(two):
    assert two[0]["wrappers"] == 0


def test_a_layer_that_is_thawed_between_epochs_is_refused_where_ranks_would_learn_it_alone(
    two,
):
    assert (
        "'first.weight' (one of 2) learns only since then, so each rank would learn it alone: "
        in two[0]["thawed"]
    )
    assert (
        "'first.weight' (one of 2) is frozen since then: give DDPStrategy(find_unused"
        in two[0]["frozen"]
    )
    assert (
        "horovod averages the gradients of what learned when fit began, and 'first.w"
        in two[0]["thawed, horovod"]
    )


def test_after_a_failure_nothing_hangs_on_the_model(two, request):
    request.addfinalizer(vgpu.stop)
    assert two[0]["thawed, horovod"].endswith("; or call fit again. Hooks: 0.")
    model = TwoLayers({})
    model.pipeline_stages = lambda: [model.first, model.layer]
    model.training_step = lambda batch, batch_idx: model(batch[0]).sum() * (1 // batch_idx)
    with pytest.raises(ZeroDivisionError):
        cpu(accelerator="vgpu", devices=2, strategy="pipeline").fit(
            model, DataLoader(rows(4), 4)
        )
    assert model(torch.ones(1, 4)).device.type == "cpu"


@pytest.mark.parametrize("strategy", ["", ", horovod"])
def test_and_the_way_that_is_named_keeps_the_ranks_equal(two, strategy):
    first, second = (rank["frozen, and thawed" + strategy] for rank in two)
    assert torch.equal(first, second)
    torch.manual_seed(0)
    assert not torch.equal(first, TwoLayers({}).first.weight.flatten()), "it has learned"


def test_workers_draw_by_the_seed_and_the_rank(two):
    first, second = (
        np.array([[part.numpy() for part in batch] for batch in rank["workers"]])
        for rank in two
    )
    assert not np.isin(first, second).any()
    assert np.array_equal(
        first, [[part.numpy() for part in batch] for batch in two[0]["again"]]
    )
    first, second = (
        np.array([[part.numpy() for part in batch] for batch in rank["not seeded"]])
        for rank in two
    )
    assert np.array_equal(first, second), "torch's own seeds know no ranks"


def test_a_users_own_worker_init_fn_stays():
    L.seed_everything(3, workers=True, verbose=False)

    def prepared(loader, training):
        return dataloaders.prepare_for_rank(cpu(), loader, training)

    own = DataLoader(rows(4), worker_init_fn=print)
    assert prepared(own, training=True).worker_init_fn is print
    assert prepared(DataLoader(rows(4)), training=False).worker_init_fn is not None
    os.environ.pop("PL_SEED_WORKERS")
    assert prepared(DataLoader(rows(4)), training=True).worker_init_fn is None


def test_evaluation_takes_a_dict_of_dataloaders():
    class Many(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("n", float(len(batch[0])))

    loaders = {"small": DataLoader(rows(2), 2), "large": DataLoader(rows(3), 3)}
    reported = cpu().validate(Many(), loaders, verbose=False)
    assert reported == [{"n/dataloader_idx_0": 2.0}, {"n/dataloader_idx_1": 3.0}]


def test_spawned_ranks_may_be_saved_after_an_evaluation(tmp_path):
    trainer, model = cpu(strategy="ddp_spawn", devices=1), make_net()
    trainer.fit(model, DataLoader(rows(4), 2))
    trainer.validate(model, DataLoader(rows(4), 2), verbose=False)
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    saved = torch.load(tmp_path / "mine.ckpt")
    assert saved["global_step"] == 2 and len(saved["optimizer_states"]) == 1
