"""ddp, ddp2, horovod, bagua and a strategy of the user on two ranks."""

import os

import pytest
import torch
import torch.distributed as dist
from numbered_rows import Net, Rows, trainer
from refusals import user_error
from strategy_net import RATE, Classes, Ended, X, Y, by_hand, fitted, gap, nce, whole
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from multigpu import launch
from multigpu.strategies import BaguaStrategy, DDPStrategy, PipelineStrategy
from multigpu.virtual import control

pytestmark = pytest.mark.filterwarnings("ignore")


def two_nodes(folder, rank):
    """ddp2: each rank is a node, with two virtual GPUs."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with control.running(count=2):
        node = fitted(
            folder,
            Ended(nce=True),
            strategy="ddp2",
            accelerator="vgpu",
            devices=2,
            max_steps=1,
        )
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    return node


def horovod(folder):
    reported = []

    class Net(Classes):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), RATE)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

        def on_train_start(self):
            reported.append(
                (
                    self.trainer.optimizers[0].param_groups[0]["lr"],
                    self.lr_schedulers().base_lrs,
                )
            )

    weights = fitted(folder, Net(gathered=False), strategy="horovod", max_epochs=2)
    reported.append(weights)
    return reported


class Own(DDPStrategy):
    called = []  # noqa: RUF012

    def init_dist_connection(self):
        Own.called.append("init_dist_connection")
        super().init_dist_connection()

    def configure_ddp(self, model, device_ids):
        Own.called.append(("configure_ddp", device_ids))
        return DistributedDataParallel(model, gradient_as_bucket_view=True)


class Early(Classes):
    """A module of Lightning before 1.0: it connects the ranks, and wraps the model."""

    called = []  # noqa: RUF012

    def init_ddp_connection(self, global_rank, world_size):
        Early.called.append((global_rank, world_size))
        super().init_ddp_connection(global_rank, world_size)

    def configure_ddp(self, model, device_ids):
        Early.called.append(device_ids)
        return super().configure_ddp(model, device_ids)


def without_the_trainer(strategy, steps=3):
    """The loop of strategies/base.py. The weights after it."""
    strategy.connect()
    net = Classes()
    model, optimizer = strategy.setup(net, torch.optim.SGD(net.parameters(), RATE))
    parts, mine = strategy.shard
    for step in range(steps):
        rows = range(8 * step + mine, 8 * step + 8, parts)
        F.cross_entropy(
            model(X[rows].to(strategy.device)), Y[rows].to(strategy.device)
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy.close()
    return [w.detach().clone() for w in net.parameters()]


def nothing(folder):
    net = type("Nothing", (Net,), {"training_step": lambda self, batch, batch_idx: None})()
    return user_error(lambda: trainer(folder, strategy="ddp").fit(net, DataLoader(Rows(4))))


def everything(folder):
    rank = int(os.environ["RANK"])
    found = {"early": fitted(folder, Early(gathered=False), strategy="ddp")}
    dist.destroy_process_group()
    found |= {
        "own": fitted(
            folder, Classes(gathered=False), strategy=Own(process_group_backend="gloo")
        )
    }
    found |= {
        "called": Own.called,
        "early called": Early.called,
        "backend": dist.get_backend(),
        "nodes": two_nodes(folder, rank),
        "horovod": horovod(folder),
        "ddp": fitted(folder, Classes(gathered=False), strategy="ddp"),
        "ddp alone": without_the_trainer(DDPStrategy()),
        "bagua alone": without_the_trainer(BaguaStrategy("bytegrad")),
        "nothing": nothing(folder),
    }
    found["ends"] = {}
    for name in ("ddp", "horovod", "bagua"):
        net = Ended(gathered=False)
        fitted(folder, net, strategy=name)
        found["ends"][name] = net.ends
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch.call(everything, 2, str(tmp_path_factory.mktemp("ranks")))


def test_ddp_is_the_full_batch(ranks):
    for rank in ranks:
        assert gap(rank["ddp"], by_hand([whole(0, 20), whole(20, 40)])) < 1e-6


def test_a_strategy_can_be_given_a_group_and_a_wrapper_of_its_own(ranks):
    for rank in ranks:
        assert (
            rank["called"] == ["init_dist_connection", ("configure_ddp", None)]
            and rank["backend"] == "gloo"
        )
        assert gap(rank["own"], rank["ddp"]) == 0


def test_a_module_can_connect_the_ranks_and_wrap_the_model(ranks):
    for number, rank in enumerate(ranks):
        assert rank["early called"] == [(number, 2), None]
        assert gap(rank["early"], rank["ddp"]) == 0


def test_ddp2_computes_the_loss_of_a_nodes_whole_batch(ranks):
    """In-batch negatives: the node's 10 rows are the reference; 5 rows a GPU, as ddp would
    have them, are not.
    """

    def parts(size):
        nodes = [X[rank:20:2] for rank in (0, 1)]
        pieces = [piece for node in nodes for piece in node.split(size)]
        return lambda net: sum(nce(net(piece)) for piece in pieces) / len(pieces)

    for rank in ranks:
        assert gap(rank["nodes"], by_hand([parts(10)])) < 1e-6
        assert gap(rank["nodes"], by_hand([parts(5)])) > 1e-3


def test_horovod_multiplies_the_learning_rate_and_what_the_scheduler_takes_for_it(ranks):
    """2 ranks: 0.2 in the first epoch, half of it in the second."""
    steps = [whole(0, 20), whole(20, 40)] * 2
    for rank in ranks:
        (rate, base), weights = rank["horovod"]
        assert rate == 2 * RATE and base == [2 * RATE]
        assert gap(weights, by_hand(steps, [2 * RATE, 2 * RATE, RATE, RATE])) < 1e-6


def test_strategies_work_in_an_ordinary_loop(ranks):
    reference = by_hand([whole(8 * step, 8 * step + 8) for step in range(3)])
    for rank in ranks:
        assert gap(rank["ddp alone"], reference) < 1e-6
        assert (
            0 < gap(rank["bagua alone"], reference) < 1e-2
            and gap(rank["bagua alone"], ranks[0]["bagua alone"]) == 0
        )


def test_a_step_that_returns_nothing_is_refused_on_several_ranks(ranks):
    for rank in ranks:
        assert "returned NoneType in batch 0 of epoch 0: return the loss" in rank["nothing"]


def test_every_strategy_calls_training_step_end(ranks, tmp_path):
    assert all(rank["ends"] == {"ddp": 2, "horovod": 2, "bagua": 2} for rank in ranks)
    for name, devices in (("single_device", 1), ("dp", 2), ("ddp2", 2), ("pipeline", 2)):
        net = Ended(gathered=False)
        if name == "ddp2":  # it starts a process group: see two_nodes
            continue
        with control.running(count=devices):
            strategy = PipelineStrategy(1) if name == "pipeline" else name
            fitted(tmp_path, net, strategy=strategy, accelerator="vgpu", devices=devices)
        assert net.ends == 4, name
