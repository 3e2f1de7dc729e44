"""Code for Lightning 1.x: its hooks run with its meaning, or a message names today's hook."""

import plain_net
import pytest
import torch
from refusals import names
from small_net import Net, cpu, make_net, rows
from torch.nn import functional as F
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu import launch

pytestmark = pytest.mark.filterwarnings("ignore")


class Old(Net):
    """It logs the means of the outputs, and keeps the outputs of each hook."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return {"loss": loss, "batch_idx": batch_idx, "scores": self(batch[0])}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return F.cross_entropy(self(batch[0]), batch[1])

    test_step = validation_step

    def training_epoch_end(self, outputs):
        self.outputs.append(("train", outputs))
        self.log("mean", torch.stack([output["loss"] for output in outputs]).mean())

    def validation_epoch_end(self, outputs):
        self.outputs.append(("val", outputs))
        if not isinstance(outputs[0], list):
            self.log("val_mean", torch.stack(outputs).mean())

    def test_epoch_end(self, outputs):
        self.outputs.append(("test", outputs))
        self.log("test_mean", torch.stack(outputs).mean())


def old() -> Old:
    torch.manual_seed(0)
    return Old()


def test_the_hooks_get_the_outputs_of_the_epoch():
    net = old()
    run = cpu(max_epochs=2)
    run.fit(net, DataLoader(rows(6), 2), DataLoader(rows(5), 2))
    # The first is the sanity check.
    assert [kind for kind, _ in net.outputs] == ["val", *["val", "train"] * 2]
    train = [outputs for kind, outputs in net.outputs if kind == "train"]
    for outputs in train:
        assert [output["batch_idx"] for output in outputs] == [0, 1, 2]
        assert not any(
            output[name].requires_grad for output in outputs for name in ("loss", "scores")
        )
    losses = [output["loss"] for output in train[-1]]
    assert run.callback_metrics["mean"] == torch.stack(losses).mean()
    (results,) = run.test(net, DataLoader(rows(5), 2), verbose=False)
    kind, outputs = net.outputs[-1]
    assert kind == "test" and len(outputs) == 3
    assert results == {"test_mean": pytest.approx(float(torch.stack(outputs).mean()))}


def test_each_dataloader_has_its_list():
    net = old()
    cpu().validate(net, [DataLoader(rows(4), 2), DataLoader(rows(6), 2)], verbose=False)
    ((_, outputs),) = net.outputs
    assert [len(of_loader) for of_loader in outputs] == [2, 3]


def test_a_loss_alone_becomes_a_dict_and_a_skipped_batch_is_left_out():
    net = old()
    net.training_step = lambda batch, batch_idx: (
        F.cross_entropy(net(batch[0]), batch[1]) if batch_idx else None
    )
    cpu().fit(net, DataLoader(rows(6), 2))
    ((_, outputs),) = net.outputs
    assert [sorted(output) for output in outputs] == [["loss"], ["loss"]]


def test_a_returned_value_is_not_lost_in_silence():
    net = old()
    net.validation_epoch_end = lambda outputs: {"log": {"val_loss": 1.0}}
    with pytest.warns(UserWarning, match=r"validation_epoch_end returned dict.*self.log"):
        cpu().validate(net, DataLoader(rows(4), 2), verbose=False)


def evaluated(count: int) -> tuple:
    """The mean over `count` rows by two, and what all_gather gives in the hook."""
    net = old()
    gathered = []

    def test_epoch_end(outputs):
        gathered.append(net.all_gather(torch.tensor(len(outputs))).tolist())
        Old.test_epoch_end(net, outputs)

    net.test_epoch_end = test_epoch_end
    run = cpu(strategy="ddp")
    (results,) = run.test(net, DataLoader(rows(count), 2), verbose=False)
    return results["test_mean"], gathered


def on_two_ranks() -> tuple:
    try:
        evaluated(2)
    except Exception as error:
        refusal = str(error)
    return *evaluated(10), refusal


@pytest.mark.slow
def test_the_ranks_means_are_the_mean_over_all_batches():
    """Five batches on two ranks: three and two, so a plain mean of the means would differ."""
    ranks = launch.call(on_two_ranks, 2)
    (results,) = cpu().test(old(), DataLoader(rows(10), 2), verbose=False)
    for mean, gathered, refusal in ranks:
        assert mean == pytest.approx(results["test_mean"], abs=1e-6)
        assert gathered == [[3, 2]]
        assert "test_epoch_end" in refusal and "1 batch for 2 ranks" in refusal


def test_a_hook_that_is_not_called_names_todays_hook():
    class Hooked(L.Callback):
        def on_epoch_end(self, trainer, pl_module): ...

    run = cpu(callbacks=[Hooked()])
    names(lambda: run.fit(make_net(), DataLoader(rows(4), 2)), "Hooked", "on_train_epoch_end")
    net = make_net()
    net.on_batch_end = lambda *_: None
    names(lambda: cpu().fit(net, DataLoader(rows(4), 2)), "Net", "on_train_batch_end")
    data = L.LightningDataModule()
    data.train_dataloader = lambda: DataLoader(rows(4), 2)
    data.on_exception = lambda exception: None
    names(lambda: cpu().fit(make_net(), data), "LightningDataModule", "in a Callback")


def prepared(monkeypatch, rank, local_rank, per_node):
    """Whether the rank calls prepare_data; its place is that on a machine of several nodes."""
    called = []
    net = make_net()
    net.prepare_data_per_node = per_node
    net.prepare_data = lambda: called.append(True)
    run = cpu()
    world = launch.World(rank=rank, size=1, local_rank=local_rank)
    monkeypatch.setattr(run.strategy, "connect", lambda: None)
    monkeypatch.setattr(run.strategy, "world", world)
    run.fit(net, DataLoader(rows(4), 2))
    return bool(called)


@pytest.mark.parametrize(
    ("rank", "local_rank", "by_node", "once"),
    [(0, 0, True, True), (2, 0, True, False), (1, 1, False, False)],
)
def test_data_is_prepared_once_per_node_or_once(monkeypatch, rank, local_rank, by_node, once):
    assert prepared(monkeypatch, rank, local_rank, per_node=True) == by_node
    assert prepared(monkeypatch, rank, local_rank, per_node=False) == once


def test_a_strategy_is_named_once():
    names(
        lambda: L.Trainer(accelerator="ddp", gpus=2), "accelerator is 'ddp'", "strategy='ddp'"
    )
    two = {"distributed_backend": "ddp", "strategy": "dp"}
    names(lambda: L.Trainer(**two), *two, "different strategies: give strategy only")
    same = {"distributed_backend": "dp", "strategy": "dp"}
    assert L.Trainer(**same, accelerator="vgpu", devices=2).strategy.name == "dp"
    assert L.Trainer(distributed_backend=None, accelerator="cpu").num_devices == 1


def test_the_index_of_the_only_optimizer_stays_at_its_default():
    class Indexed(plain_net.Net):
        indices = ()

        def training_step(self, batch, batch_idx, optimizer_idx=0):
            self.indices += (optimizer_idx,)
            return super().training_step(batch, batch_idx)

    model = Indexed()
    plain_net.trainer().fit(model, DataLoader(plain_net.rows(), 4))
    assert model.indices == (0, 0)


@pytest.mark.parametrize("name", ["add_argparse_args", "from_argparse_args", "tune"])
def test_a_method_that_is_gone_names_what_to_do(name):
    names(lambda: getattr(L.Trainer, name)(None), name, "Lightning itself")
