# %% [markdown]
# # 11 · Precision: 32, 16, bf16, and who may use which
# **The question.** `Trainer(precision=16)` is one argument. They say that it halves the memory and doubles the speed. May I
# use it: on which GPU, with which strategy? And does the model still learn the same?
#
# **Predict first.** (1) Which of 1e-8, 65520 and 1 + 1/512 survive in float16, which in bfloat16? (2) A weight is 1, all is in
# bfloat16, and 1,000 steps add 0.001 each: what is it then? (3) How much memory does mixed precision save?

# %%
import argparse
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from multigpu import data, devices, files, flags, launch, metrics, proof, vgpu
from multigpu.models import CNN
from multigpu.trainer import Callback, LightningModule, Trainer

# %% [markdown]
# ## What a number is made of
# Sign, exponent, fraction. The exponent's bits are the range, the fraction's are the spacing. Prediction (1):

# %% tags=["active-ipynb"]
# from multigpu import plots
# for dtype, exponent, whole in ((torch.float32, 8, torch.int32), (torch.bfloat16, 8, torch.int16), (torch.float16, 5, torch.int16)):
#     limits, size = torch.finfo(dtype), torch.finfo(dtype).bits
#     print(f"{dtype}: at most {limits.max:.3g}, normal from {limits.tiny:.1e}, spacing after 1: 1/{1 / limits.eps:.0f}")
#     for number in (1e-8, 65520.0, 1 + 1 / 512):
#         stored = torch.tensor(number, dtype=dtype)
#         bits = f"{stored.view(whole).item() & (2**size - 1):0{size}b}"
#         print(f"  {number:<12.9g} is {stored.item():<14.9g} {bits[0]} {bits[1 : 1 + exponent]} {bits[1 + exponent :]}")

# %% [markdown]
# ## A gradient that is gone, by hand
# float16 ends at 6e-8. Backward multiplies small numbers, so gradients get there first. The cure: multiply the loss by a
# large number. All gradients are then larger by it, and are divided in 32 bit, before the step. That is **loss scaling**.

# %% tags=["active-ipynb"]
# for scale in (1, 65536):
#     weight, image = torch.ones((), dtype=torch.float16, requires_grad=True), torch.tensor(0.01, dtype=torch.float16)
#     loss = (weight * image) * 1e-6  # on paper, the gradient is 0.01 × 1e-6 = 1e-8
#     (loss.float() * scale).backward(inputs=[weight])
#     print(f"scale {scale}: gradient {weight.grad.item():.1e}, in its true size {weight.grad.float().item() / scale:.1e}")

# %% [markdown]
# ## What is computed in which type
# **Mixed** precision: the weights stay in 32 bit, and within `torch.autocast` each operation has its type by a list.

# %% tags=["active-ipynb"]
# (first, second), model = vgpu.start(2), CNN()
# model.to(first)
# with torch.autocast("vgpu", torch.float16):
#     logits = model(torch.rand(8, 1, 8, 8, device=first))
#     loss = F.cross_entropy(logits, torch.arange(8, device=first))
#     softmax, tanh = logits.softmax(1), logits.tanh()
# loss.backward()
# shown = {"weight": model.fc2.weight, "linear": logits, "tanh": tanh, "softmax": softmax, "loss": loss}
# print(", ".join(f"{name} {str(t.dtype)[6:]}" for name, t in (shown | {"gradient": model.fc2.weight.grad}).items()))

# %% [markdown]
# ## The script: the flags, and a module without a word of precision
# The batch is weighted as in lesson 05: the mean over the images of all ranks. `training_step` gives a loss for each image, and
# `training_step_end` adds them up after dp has gathered them. `--loss-weight` makes gradients small, for an experiment below.


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser("PTL_Precision", "Train a CNN with the Trainer, in the numbers that you name.")
    flag = parser.add_argument
    flag("--precision", default="32", help="32, 64, 16, bf16, or in full: 16-mixed, 16-true, … (default: 32)")
    flag("--accelerator", default="auto", help="cpu, gpu, vgpu (virtual GPUs) or auto (default)")
    flag("--devices", type=flags.positive, help="how many (default: 1, or one for each of the launcher's ranks)")
    flag("--strategy", default="auto", help="dp, ddp, … (default: ddp, if there are several devices)")
    flag("--gpu", default="V100-16GB", help="what virtual GPUs stand for (default: V100-16GB)")
    flag("--loss-weight", type=flags.positive_float, default=1.0, help="multiplies the loss, and divides --lr")
    return parser.parse_args(arguments)


class LitCNN(LightningModule):
    def __init__(self, train: TensorDataset, test: TensorDataset, args: argparse.Namespace):
        super().__init__()
        torch.manual_seed(args.seed)
        self.cnn = CNN(tuple(train[0][0].shape), data.classes(train, test))
        self.images, self.batch, self.seed, self.weight, self.lr = (
            train,
            args.batch_size,
            args.seed,
            args.loss_weight,
            args.lr,
        )

    def training_step(self, batch: list, index: int) -> torch.Tensor:
        (images, labels), n, trainer = batch, len(self.images), self.trainer
        at = index * self.batch // trainer.world_size + torch.arange(len(labels), device=labels.device)
        real = at * trainer.world_size + trainer.global_rank < n  # the sampler's repeated images have weight 0
        losses = F.cross_entropy(self.cnn(images), labels, reduction="none") * real
        self.log("loss", losses.sum() / n, on_step=False, on_epoch=True, reduce_fx="sum")
        return losses * self.weight * trainer.world_size / min(self.batch, n - index * self.batch)

    def training_step_end(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.sum()

    def validation_step(self, batch: list, index: int) -> None:
        hits = self.cnn(batch[0]).argmax(1) == batch[1]
        self.log("test_accuracy", hits.float().mean(), batch_size=len(hits))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr / self.weight, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        ranks = self.trainer.world_size
        sampler = DistributedSampler(self.images, ranks, self.trainer.global_rank, seed=self.seed)
        return DataLoader(self.images, self.batch // ranks, sampler=sampler, generator=torch.Generator())


class Table(Callback):
    """What the other lessons print, kept in `rows`; a spawned rank's come back to the parent by `state_dict`."""

    def __init__(self):
        self.rows, self.name = [], ""

    def on_fit_start(self, trainer, module):
        trainer.print(devices.describe(trainer.strategy.world, trainer.strategy.device, each=trainer.num_devices))
        told = (
            f"strategy {trainer.strategy.name}, precision {trainer.precision_plugin.name}, global batch {module.batch}"
        )
        trainer.print(f"{told}\n\n{metrics.header()}", flush=True)

    def on_train_epoch_start(self, trainer, module):
        self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer, module):
        row = {name: float(trainer.callback_metrics[name]) for name in ("loss", "test_accuracy")}
        row["images_per_s"] = len(module.images) / (time.perf_counter() - self.began)
        metrics.finite(row["loss"], trainer.current_epoch, trainer.strategy.world)
        self.rows.append({"epoch": trainer.current_epoch + 1, **row})
        trainer.print(metrics.row(self.rows[-1]), flush=True)

    def state_dict(self):
        return {"rows": self.rows, "name": self.name}

    def load_state_dict(self, state):
        self.rows, self.name = state["rows"], state["name"]


def trainer_of(args: argparse.Namespace, *callbacks: Callback, **more: object) -> Trainer:
    return Trainer(
        precision=args.precision, accelerator=args.accelerator, devices=args.devices or "auto", strategy=args.strategy,
        max_epochs=args.epochs, callbacks=list(callbacks), logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, **more,
    )  # fmt: skip


# %% [markdown]
# ## The proof: what may be asked of 16 bit
# 32 and 64 bit must give the weights of a serial run in the same type. 16 bit cannot. Asked is that it *learns the same*: each
# epoch's loss within 0.002 of the serial run's in 32 bit, the accuracy within 0.01. Mixed runs stay below 0.0005.


# %%
def serial_in_32_bit(model: CNN, train: TensorDataset, test: TensorDataset, args: argparse.Namespace) -> list[tuple]:
    """Each epoch's (loss, test accuracy)."""
    (images, labels), optimizer, curve = train.tensors, torch.optim.SGD(model.parameters(), args.lr, momentum=0.9), []
    for epoch in range(args.epochs):
        order, total = torch.randperm(len(train), generator=torch.Generator().manual_seed(args.seed + epoch)), 0.0
        for batch in order.split(args.batch_size):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch) / len(train)
        hits = model(test.tensors[0]).argmax(1) == test.tensors[1]
        curve.append((total, hits.float().mean().item()))
    return curve


def prove(table: Table, module: LitCNN, train: TensorDataset, test: TensorDataset, args: argparse.Namespace) -> dict:
    name, rows = table.name, table.rows
    home, fresh = devices.home([next(module.parameters()).device]), LitCNN(train, test, args).cnn
    if name in ("32-true", "64-true"):
        dtype = module.dtype
        same = TensorDataset(train.tensors[0].to(dtype), train.tensors[1])
        return proof.against_serial(f"{name} equals one process", module.cnn, fresh.to(home, dtype), same, args)
    curve, what = serial_in_32_bit(fresh, train, test, args), f"{name} learns what 32 bit learns"
    apart = max(abs(row["loss"] - loss) for row, (loss, _) in zip(rows, curve, strict=True))
    verdicts = [proof.verdict(f"{what}, loss by epoch", apart, 2e-3)]
    verdicts.append(proof.verdict(f"{what}, test accuracy", abs(rows[-1]["test_accuracy"] - curve[-1][1]), 1e-2))
    return min(verdicts, key=lambda verdict: verdict["holds"])


# %% [markdown]
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    args.batch_size, _ = flags.split(args.batch_size, max(launch.find().size, args.devices or 1), who="device")
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    if args.accelerator == "vgpu":
        vgpu.start(args.devices or 1, gpu=args.gpu)
    if args.prove:
        devices.compute_exactly()  # no TF32, else 32 is not 32
    module, table = LitCNN(train, test, args), Table()
    trainer = trainer_of(args, table)
    trainer.fit(module, val_dataloaders=DataLoader(test, batch_size=256))
    if trainer.is_global_zero:
        with files.atomic(args.out / "model.pt") as temporary:
            torch.save({name: weight.cpu() for name, weight in module.cnn.state_dict().items()}, temporary)
        place = torch.device(trainer.accelerator.kind)
        verdict = prove(table, module, train, test, args) if args.prove else None
        told = {
            "devices": trainer.num_devices * trainer.world_size,
            "batch_size": args.batch_size,
            "precision": table.name,
        }
        metrics.report(args.out, trainer.strategy.world, place, table.rows, verdict, **told)


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())
