"""A classifier for the tests of strategies, its data, and the same training by hand."""

import torch
from numbered_rows import trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import multigpu.trainer as L

RATE = 0.1
SOURCE = torch.Generator().manual_seed(0)
X, Y = torch.randn(40, 6, generator=SOURCE), torch.randint(0, 3, (40,), generator=SOURCE)
# Rows that differ in size, so that a wrong mean shows.
X *= torch.linspace(0.1, 3, 40).unsqueeze(1)


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


def by_hand(losses, rates=(RATE,) * 9):
    """The weights after ordinary steps down these losses, each a function of the net."""
    net = Classes()
    for loss, rate in zip(losses, rates, strict=False):
        net.zero_grad()
        loss(net).backward()
        for weight in net.parameters():
            weight.data -= rate * weight.grad
    return [w.detach() for w in net.parameters()]


def whole(start, end):
    return lambda net: F.cross_entropy(net(X[start:end]), Y[start:end])


def gap(mine, theirs):
    return max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True))
