"""A whole program for the Trainer. For Lightning, change the second import to `lightning`.

python lessons/09-lightning/own.py
"""

import torch

import multigpu.trainer as L


class Net(L.LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()  # so that a checkpoint can make the module again
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layer(images), labels)
        # loss_step is each step's value, loss_epoch the epoch's, over all ranks.
        # In Lightning only sync_dist=True makes it the mean over the ranks.
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    L.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    stop = L.pytorch.callbacks.EarlyStopping("loss_epoch", patience=3)
    trainer = L.Trainer(accelerator="auto", devices=2, max_epochs=9, callbacks=[stop])
    trainer.fit(Net(), loader)
    trainer.save_checkpoint("mine.ckpt")  # all ranks call it, rank 0 writes
    trainer.print(f"{trainer.current_epoch} epochs, {trainer.global_step} steps")
    trainer.print(Net.load_from_checkpoint("mine.ckpt"))
