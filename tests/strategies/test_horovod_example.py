"""A program with the calls of Horovod's pytorch_mnist.py, in their order, without its `op`.

Its import names the course's Horovod instead of horovod.torch. The model and the data are
small. One process with the whole batch is the reference.
"""

import re
import warnings

import pytest
from commands import run_script, torchrun

pytestmark = pytest.mark.slow

PROGRAM = """
import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from multigpu.strategies import horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.05)


def main(args):
    def train_epoch(epoch):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.nll_loss(F.log_softmax(model(x), dim=1), y).backward()
            optimizer.step()

    def metric_average(val, name):
        return hvd.allreduce(torch.tensor(val), name=name).item()

    def test():
        model.eval()
        loss = 0.0
        accuracy = 0.0
        for x, y in test_loader:
            output = F.log_softmax(model(x), dim=1)
            loss += F.nll_loss(output, y, reduction="sum").item()
            accuracy += output.max(1)[1].eq(y).float().sum().item()
        loss = metric_average(loss / len(test_sampler), "avg_loss")
        accuracy = metric_average(accuracy / len(test_sampler), "avg_accuracy")
        if hvd.rank() == 0:
            print(f"loss {loss:.6f} accuracy {accuracy:.4f} on {hvd.size()}", flush=True)

    hvd.init()
    torch.manual_seed(hvd.rank())  # the broadcast below makes the ranks equal
    torch.set_num_threads(1)
    source = torch.Generator().manual_seed(0)
    x = torch.randn(96, 6, generator=source)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    data = TensorDataset(x, y)
    size = hvd.size()
    sampler = DistributedSampler(data, num_replicas=size, rank=hvd.rank(), shuffle=False)
    loader = DataLoader(data, batch_size=args.batch_size // size, sampler=sampler)
    test_sampler = DistributedSampler(data, num_replicas=size, rank=hvd.rank())
    test_loader = DataLoader(data, batch_size=32, sampler=test_sampler)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    lr = args.lr / size  # so that one process has the same rate
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * size, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    for epoch in range(1, 4):
        train_epoch(epoch)
        test()


if __name__ == "__main__":
    main(parser.parse_args())
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("horovod") / "train.py"
    path.write_text(PROGRAM)
    return path


def reported(done) -> list[float]:
    """Losses and accuracies of three epochs."""
    assert done.returncode == 0, done.stdout
    pairs = re.findall(r"loss (\S+) accuracy (\S+) on", done.stdout)
    assert len(pairs) == 3, done.stdout
    return [float(number) for pair in pairs for number in pair]


def test_two_ranks_report_what_one_process_reports(program):
    warnings.simplefilter("ignore")
    alone = reported(run_script(program))
    assert reported(torchrun(2, program)) == pytest.approx(alone, abs=2e-6)
    short = reported(torchrun(2, program, "--fp16-allreduce"))
    assert short == pytest.approx(alone, abs=1e-2)
