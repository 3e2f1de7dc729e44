"""Each strategy with and without the Trainer, on two ranks: for test_strategies.py."""

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from trainer_ranks import Net, Rows, sentence, trainer

import multigpu.trainer as L
from multigpu import vgpu
from multigpu.errors import UserError
from multigpu.strategies import BaguaStrategy, DDPStrategy

RATE = 0.1
SOURCE = torch.Generator().manual_seed(0)
X, Y = torch.randn(40, 6, generator=SOURCE), torch.randint(0, 3, (40,), generator=SOURCE)
X *= torch.linspace(0.1, 3, 40).unsqueeze(
    1
)  # rows that differ in size, so that a wrong mean shows


class Classes(L.LightningModule):
    """gathered=True: training_step_end computes the loss from the whole batch."""

    def __init__(self, gathered=True, nce=False, sgd=torch.optim.SGD):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)
        self.gathered, self.nce, self.sgd, self.losses, self.ends = gathered, nce, sgd, [], 0

    def forward(self, x):
        return self.second(self.first(x).tanh())

    def pipeline_stages(self):
        return [self.first, self.second]

    def training_step(self, batch, batch_idx):
        scores = self(batch[0])
        labels = batch[1].to(scores.device)
        return (
            {"scores": scores, "labels": labels}
            if self.gathered
            else F.cross_entropy(scores, labels)
        )

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return self.sgd(self.parameters(), RATE)


class Ended(Classes):
    def training_step_end(self, output):
        self.ends += 1
        if not self.gathered:
            return output.mean()  # dp: of the replicas' losses
        if self.nce:
            return nce(output["scores"])
        return F.cross_entropy(output["scores"], output["labels"])


def nce(rows):
    """Each row's partner is the next; all the others are the negatives."""
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows), device=rows.device).roll(-1))


def fitted(folder, net, batch=10, **arguments):
    """The net after a fit in order; its weights on the CPU."""
    run = trainer(folder, **arguments)
    run.fit(net, DataLoader(TensorDataset(X, Y), batch))
    net.run = run
    return [w.detach().cpu().clone() for w in net.parameters()]


def two_nodes(folder, rank):
    """ddp2: each rank is a node, with two virtual GPUs."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with vgpu.running(count=2):
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


class Unused(Classes):
    def __init__(self):
        super().__init__(gathered=False)
        self.spare = torch.nn.Linear(2, 2)


def unused(folder, answer):
    try:
        fitted(folder, Unused(), strategy=f"ddp_find_unused_parameters_{answer}", max_steps=3)
    except UserError as error:
        return str(error)
    return ""


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


class Two(Classes):
    def __init__(self):
        super().__init__(gathered=False)
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.first.parameters()),
            torch.optim.Adam(self.second.parameters()),
        ]


def nothing(folder):
    net = type("Nothing", (Net,), {"training_step": lambda self, batch, batch_idx: None})()
    return sentence(lambda: trainer(folder, strategy="ddp").fit(net, DataLoader(Rows(4))))


def everything(folder):
    rank = int(os.environ["RANK"])
    found = {
        "own": fitted(
            folder, Classes(gathered=False), strategy=Own(process_group_backend="gloo")
        )
    }
    found |= {
        "called": Own.called,
        "backend": dist.get_backend(),
        "nodes": two_nodes(folder, rank),
        "horovod": horovod(folder),
        "ddp": fitted(folder, Classes(gathered=False), strategy="ddp"),
        "unused": [unused(folder, answer) for answer in ("true", "false")],
        "ddp alone": without_the_trainer(DDPStrategy()),
        "bagua alone": without_the_trainer(BaguaStrategy("bytegrad")),
        "qadam": sentence(lambda: fitted(folder, Two(), strategy=BaguaStrategy("qadam"))),
        "nothing": nothing(folder),
    }
    found["ends"] = {}
    for name in ("ddp", "horovod", "bagua"):
        net = Ended(gathered=False)
        fitted(folder, net, strategy=name)
        found["ends"][name] = net.ends
    return found
