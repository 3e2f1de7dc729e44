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
# Sign, exponent, fraction: the exponent's bits are the range, the fraction's are the spacing. Prediction (1):

# %% tags=["active-ipynb"]
# from multigpu import plots
# for dtype, whole, exponent in (torch.float32, torch.int32, 8), (torch.bfloat16, torch.int16, 8), (torch.float16, torch.int16, 5):
#     limits = torch.finfo(dtype)
#     print(f"{dtype}: at most {limits.max:.3g}, normal from {limits.tiny:.1e}, spacing after 1: 1/{1 / limits.eps:.0f}")
#     for number in (1e-8, 65520.0, 1 + 1 / 512):
#         stored = torch.tensor(number, dtype=dtype)
#         bits = f"{stored.view(whole).item() & (2**limits.bits - 1):0{limits.bits}b}"
#         print(f"  {number:<12.9g} is {stored.item():<14.9g} {bits[0]} {bits[1 : 1 + exponent]} {bits[1 + exponent :]}")

# %% [markdown]
# ## A gradient that is gone, by hand
# float16 ends at 6e-8. Backward multiplies small numbers, and gradients get there. The cure, **loss scaling**: multiply the
# loss by a large number. All gradients are larger by it, and they are divided in 32 bit, before the step.

# %% tags=["active-ipynb"]
# for scale in (1, 65536):
#     weight, image = torch.ones((), dtype=torch.float16, requires_grad=True), torch.tensor(0.01, dtype=torch.float16)
#     ((weight * image).float() * 1e-6 * scale).backward()  # on paper, the gradient is 0.01 × 1e-6 = 1e-8, times scale
#     print(f"scale {scale}: gradient {weight.grad.item():.1e}, in its true size {weight.grad.float().item() / scale:.1e}")

# %% [markdown]
# ## What is computed in which type
# In **mixed** precision the weights stay in 32 bit. Within `torch.autocast`, a list says which operation takes which type.

# %% tags=["active-ipynb"]
# first, second = vgpu.start(2)
# model = CNN().to(first)
# with torch.autocast("vgpu", torch.float16):
#     logits = model(torch.rand(8, 1, 8, 8, device=first))
#     shown = {"linear": logits, "tanh": logits.tanh(), "softmax": logits.softmax(1), "sum": logits.sum()}
#     shown["loss"] = F.cross_entropy(logits, torch.arange(8, device=first))
# shown["loss"].backward()
# shown |= {"weight": model.fc2.weight, "its gradient": model.fc2.weight.grad}
# print(", ".join(f"{name} {str(tensor.dtype)[6:]}" for name, tensor in shown.items()))

# %% [markdown]
# ## The script: a module without a word of precision
# A step's loss is the mean over the images of all ranks, as in lesson 05. `training_step_end` gets what dp has gathered.


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PTL_Precision", "Train a CNN with the Trainer, in the numbers that you name."
    )
    flag = parser.add_argument
    flag(
        "--precision",
        default="32",
        help="32, 64, 16, bf16, or in full: 16-mixed, 16-true, … (default: 32)",
    )
    flag(
        "--accelerator", default="auto", help="cpu, gpu, vgpu (virtual GPUs) or auto (default)"
    )
    flag(
        "--devices",
        type=flags.positive,
        help="how many (default: 1, or one for each of the launcher's ranks)",
    )
    flag(
        "--strategy",
        choices=("auto", "dp", "ddp", "ddp2"),
        default="auto",
        help="auto (default): ddp, for several",
    )
    flag("--gpu", help="what virtual GPUs stand for (default: V100-16GB)")
    flag(
        "--loss-weight",
        type=flags.positive_float,
        default=1.0,
        help="multiplies the loss, and divides --lr",
    )
    args = parser.parse_args(arguments)
    if args.gpu and args.accelerator != "vgpu":
        parser.error(
            "--gpu says what virtual GPUs stand for: give --accelerator vgpu with it, or leave it out"
        )
    return args


class LitCNN(LightningModule):
    def __init__(self, train: TensorDataset, test: TensorDataset, args: argparse.Namespace):
        super().__init__()
        torch.manual_seed(args.seed)
        self.cnn = CNN(tuple(train[0][0].shape), data.classes(train, test))
        self.images, self.args, self.batch = train, args, args.batch_size

    def training_step(self, batch: list, index: int) -> torch.Tensor:
        (images, labels), n, trainer = batch, len(self.images), self.trainer
        at = index * self.batch // trainer.world_size + torch.arange(
            len(labels), device=labels.device
        )
        real = (
            at * trainer.world_size + trainer.global_rank < n
        )  # the sampler's repeated images have weight 0
        losses = F.cross_entropy(self.cnn(images), labels, reduction="none") * real
        self.log("loss", losses.sum() / n, on_step=False, on_epoch=True, reduce_fx="sum")
        return (
            losses
            * self.args.loss_weight
            * trainer.world_size
            / min(self.batch, n - index * self.batch)
        )

    def training_step_end(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.sum()

    def validation_step(self, batch: list, index: int) -> None:
        logits, labels = self.cnn(batch[0]), batch[1]
        self.log("test_loss", F.cross_entropy(logits, labels), batch_size=len(labels))
        self.log(
            "test_accuracy",
            (logits.argmax(1) == labels).float().mean(),
            batch_size=len(labels),
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.parameters(), self.args.lr / self.args.loss_weight, momentum=0.9
        )

    def train_dataloader(self) -> DataLoader:
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(self.images, ranks, rank, seed=self.args.seed)
        return DataLoader(
            self.images, self.batch // ranks, sampler=sampler, generator=torch.Generator()
        )


class Table(Callback):
    def on_fit_start(self, trainer, module):
        self.rows = []
        trainer.print(
            devices.describe(
                trainer.strategy.world, trainer.strategy.device, each=trainer.num_devices
            )
        )
        told = f"strategy {trainer.strategy.name}, precision {trainer.precision_plugin.name}"
        trainer.print(f"{told}, global batch {module.batch}\n\n{metrics.header()}", flush=True)

    def on_train_epoch_start(self, trainer, module):
        self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer, module):
        row = {
            name: float(trainer.callback_metrics[name])
            for name in ("loss", "test_loss", "test_accuracy")
        }
        metrics.finite(row["loss"], trainer.current_epoch, trainer.strategy.world)
        speed = len(module.images) / (time.perf_counter() - self.began)
        self.rows.append({"epoch": trainer.current_epoch + 1, **row, "images_per_s": speed})
        trainer.print(metrics.row(self.rows[-1]), flush=True)


def trainer_of(args: argparse.Namespace, *callbacks: Callback, **more: object) -> Trainer:
    off = (
        "logger",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
        "num_sanity_val_steps",
    )
    what = {
        name: getattr(args, name) for name in ("precision", "accelerator", "strategy")
    } | dict.fromkeys(off, False)
    return Trainer(
        devices=args.devices or "auto",
        max_epochs=args.epochs,
        callbacks=callbacks,
        **what,
        **more,
    )


# %% [markdown]
# ## The document's table, line by line
# Which rows of Lightning 1's documentation run here? And the one that it forbids, "due to an issue with Apex": dp with 16 bit.

# %% tags=["active-ipynb"]
# (train, test), one = data.load(data.fetch(None)), None
# rows = ["auto 1 32 yes", "auto 1 16 yes", "dp 2 32 yes", "ddp_notebook 2 32 yes", "ddp_notebook 2 16 yes", "dp 2 16 no"]
# for strategy, count, precision, says in map(str.split, rows):
#     args = parse(["--batch-size", "64", "--accelerator", "vgpu", "--devices", count, "--precision", precision])
#     module, args.strategy = LitCNN(train, test, args), strategy
#     trainer_of(args, max_steps=3, limit_val_batches=0).fit(module)
#     one = one or module
#     is_so = "equals" if (found := proof.difference(module, one)) < 1e-6 else "is 16 bit away from" if found < 1e-3 else "misses"
#     print(f"{strategy:<12} devices={count} precision={precision}: the document says {says:<3}; here it runs, and {is_so} row 1")

# %% [markdown]
# **The scale finds its size.** After an overflow, `GradScaler` skips the step and halves the scale; after many good steps (here
# 8, by default 2,000) it doubles it. This CNN would not need it. So the loss is made small, × 1e-5, and the learning rate large,
# × 1e5: on paper the same training.

# %% tags=["active-ipynb"]
# import contextlib, io, sys
# sys.path.insert(0, "../lessons/11-precision")  # the longer experiments are in experiments.py there
# from experiments import draw_scales, memory, scales, speed
# draw_scales(scales(*(part.to(first) for part in train[:32]), first=2.0**26, patience=8, steps=40))

# %% tags=["active-ipynb"]
# def learn(words, kind=LitCNN):
#     args, table = parse(["--batch-size", "64", *words.split()]), Table()
#     with contextlib.redirect_stdout(io.StringIO()):
#         trainer_of(args, table).fit(kind(train, test, args), val_dataloaders=DataLoader(test, 256))
#     return table.rows
# class Unscaled(LitCNN):
#     def on_fit_start(self):
#         self.trainer.precision_plugin.scaler = None
# for precision, kind in (("32", LitCNN), ("16", LitCNN), ("16", Unscaled)):
#     row = learn(f"--epochs 2 --loss-weight 1e-5 --accelerator vgpu --precision {precision}", kind)[-1]
#     print(f"precision={precision}, {kind.__name__}: loss {row['loss']:.2f}, test accuracy {row['test_accuracy']:.2f}")

# %% [markdown]
# **All in 16 bit.** Near 1, bfloat16 has a number every 1/128: whoever adds less than half of that adds nothing. Prediction
# (2), and the CNN with a small learning rate. Mixed precision has its weights in 32 bit, so its curve lies on 32-true's.

# %% tags=["active-ipynb"]
# for dtype in (torch.float32, torch.float16, torch.bfloat16):
#     weight = torch.ones((), dtype=dtype)
#     for _ in range(1000):
#         weight += 0.001
#     print(f"{dtype}: 1 + 1,000 × 0.001 = {weight.item():.2f}")
# runs = {name: learn(f"--accelerator cpu --lr 0.001 --precision {name}") for name in ("32-true", "bf16-mixed", "bf16-true")}
# curves = {name: [row["test_accuracy"] for row in rows] for name, rows in runs.items()}
# title = "With weights in bf16, small steps are lost"
# plots.lines(range(1, 11), curves, "epoch", "test accuracy", title, level=None, powers=False, dashed="bf16-mixed")

# %% [markdown]
# ## Memory and time
# Prediction (3): here the weights are large, and activations grow with the batch. Then time: a virtual GPU has a peak for each
# type. bf16 counts as fp16, a 32-bit convolution as TF32 where there is, as in torch; casts and launches cost, too.

# %% tags=["active-ipynb"]
# vgpu.stop()
# display(memory())
# speed()

# %% [markdown]
# ## All together
# The proof: 32 and 64 bit must give the weights of a serial run in the same type. 16 bit cannot. Asked is that it *learns the
# same* as a serial run in 32 bit: the test loss within 0.005 after each epoch, and the accuracy within 0.01 at the end.


# %%
def main(args: argparse.Namespace) -> None:
    args.batch_size, _ = flags.split(
        args.batch_size, max(launch.find().size, args.devices or 1), who="device"
    )
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    if args.accelerator == "vgpu":
        vgpu.start(args.devices or 1, gpu=args.gpu or "V100-16GB")
    if args.prove:
        devices.compute_exactly()  # no TF32, else 32 is not 32
    module, fresh, table = LitCNN(train, test, args), LitCNN(train, test, args).cnn, Table()
    trainer = trainer_of(args, table)
    trainer.fit(module, val_dataloaders=DataLoader(test, batch_size=256))
    trainer.save_checkpoint(args.out / "last.ckpt")
    if not trainer.is_global_zero:
        return
    verdict, precision, dtype = None, trainer.precision_plugin.name, module.dtype
    if args.prove and precision in ("32-true", "64-true"):
        same = TensorDataset(train.tensors[0].to(dtype), train.tensors[1])
        fresh.to(devices.home([module.device]), dtype)
        verdict = proof.against_serial(
            f"{precision} equals one process", module.cnn, fresh, same, args
        )
    elif args.prove:
        what = f"{precision} learns what 32 bit learns"
        verdict = proof.learns_the_same(what, table.rows, fresh, train, test, args)
    told = {
        "devices": trainer.num_devices * trainer.world_size,
        "batch_size": args.batch_size,
        "precision": precision,
    }
    metrics.report(
        args.out, trainer.strategy.world, trainer.strategy.device, table.rows, verdict, **told
    )


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# Who may use what, which the Trainer tells. The proof of 16 bit. And one that fails: all in bfloat16, with a smaller learning rate.

# %% tags=["active-ipynb"]
# !python ../scripts/PTL_Precision.py --precision bf16 --accelerator vgpu --gpu V100-16GB || true
# !python ../scripts/PTL_Precision.py --precision 16 --accelerator cpu --epochs 1 --out results/11-cpu 2>&1 | grep -o "precision 16.*"
# !python ../scripts/PTL_Precision.py --precision 16 --accelerator vgpu --prove --out results/11
# !python ../scripts/PTL_Precision.py --precision bf16-true --accelerator cpu --lr 0.01 --prove --out results/11-true | grep epoch:

# %% tags=["active-ipynb"]
# print(metrics.line("11 16-mixed", "results/11"))
