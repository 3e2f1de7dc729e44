"""FunASR's own epoch, with gradients of three micro-batches: funasr.train_utils.trainer_ds."""

import os
import tempfile

import tiny
import torch
from torch import nn

tiny.without_init("funasr")

from funasr.train_utils.trainer_ds import Trainer  # noqa: E402

MICRO_BATCHES = 3


class Model(nn.Module):
    """Answers as FunASR's models do: with the loss, what is logged, and the weight."""

    def __init__(self):
        super().__init__()
        self.layers = tiny.model(outputs=1)

    def forward(self, rows: torch.Tensor, targets: torch.Tensor):
        loss = (self.layers(rows) - targets).square().mean()
        return loss, {"loss": loss.detach()}, torch.tensor(len(rows))


class Loader(list):
    """A list of batches that has what the trainer asks of a DataLoader."""

    @property
    def batch_sampler(self):
        return self

    def set_epoch(self, epoch: int) -> None:
        pass


def main() -> None:
    tiny.start()
    ranks = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            rank=rank,
            local_rank=rank,
            world_size=ranks,
            use_ddp=ranks > 1,
            device="cpu",
            accum_grad=MICRO_BATCHES,
            output_dir=folder,
        )
        model = tiny.parallel(Model()) if ranks > 1 else Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = Loader(
            {"rows": tiny.share(rows), "targets": tiny.share(rows.sum(1, keepdim=True))}
            for rows in tiny.batches(8, count=tiny.STEPS * MICRO_BATCHES)
        )
        trainer.train_epoch(
            model=model,
            optim=optimizer,
            scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1),
            dataloader_train=loader,
            epoch=0,
        )
    print(f"loss {trainer.train_loss_avg:.4f}")
    tiny.end()


if __name__ == "__main__":
    main()
