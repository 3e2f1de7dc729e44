# %% [markdown]
# # 11 · Precision: fp32, fp16, bf16, and which hardware supports each
# **The question.** `Trainer(precision=16)` is one argument. It is said to halve the memory and
# double the speed. May I use it: on which GPU, with which strategy? And does the model still
# learn the same?

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from multigpu import data, devices, files, flags, launch, metrics, proof, vgpu
from multigpu.models import CNN
from multigpu.trainer import Callback, LightningModule, Trainer


# %% jupyter={"source_hidden": true}
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PTL_Precision",
        "Train a CNN with the Trainer, in the precision that you name.",
    )
    parser.add_argument(
        "--precision",
        default="32",
        help="32, 64, 16, bf16, or in full: 16-mixed, 16-true, … (default: 32)",
    )
    parser.add_argument(
        "--accelerator",
        default="auto",
        help="cpu, gpu, vgpu (virtual GPUs) or auto (default)",
    )
    parser.add_argument(
        "--devices",
        type=flags.positive,
        help="number of devices (default: 1, or one for each of the launcher's ranks)",
    )
    parser.add_argument(
        "--strategy",
        choices=("auto", "dp", "ddp", "ddp2"),
        default="auto",
        help="auto (default): ddp, if there are several devices",
    )
    parser.add_argument(
        "--gpu",
        help="the GPU that virtual GPUs simulate (default: V100-16GB)",
    )
    parser.add_argument(
        "--loss-weight",
        type=flags.positive_float,
        default=1.0,
        help="multiplies the loss, and divides --lr: on paper, it changes nothing",
    )
    args = parser.parse_args(arguments)
    if args.gpu and args.accelerator != "vgpu":
        parser.error(
            "--gpu says what virtual GPUs simulate: give --accelerator vgpu with it, "
            "or leave it out"
        )
    return args


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# import textwrap
# import warnings
#
# from multigpu import lesson
# from multigpu.errors import UserError
#
# lesson.setup("11-precision", ranks=True)
# torch.set_num_threads(1)  # the batches are small: more threads would wait for each other
# from experiments import draw_memory, draw_scales, draw_speedups, memory, scales, speedups
#
# train, test = data.load(data.fetch(None))

# %% [markdown]
# ## The parts of a number
# Sign, exponent, fraction: the exponent's bits give the range, the fraction's bits give the
# spacing.
#
# ![The bits of float32, bfloat16 and float16](../lessons/11-precision/bits.png)
#
# The next cell stores three numbers in each type. Write your answer, then run the cell.

# %% tags=["active-ipynb", "guess"]
# guess_kept = "65520"  # float16 stores one of them exactly: "1e-8", "65520" or "1 + 1/512"?

# %% tags=["active-ipynb"]
# lesson.need(guess_kept, choices=("1e-8", "65520", "1 + 1/512"))
#
#
# def bits_of(stored, exponent_bits):
#     """The bits of a number, as sign, exponent and fraction."""
#     bits = torch.finfo(stored.dtype).bits
#     as_integer = stored.view(torch.int32 if bits == 32 else torch.int16).item()
#     text = f"{as_integer & (2**bits - 1):0{bits}b}"
#     return f"{text[0]} {text[1 : 1 + exponent_bits]} {text[1 + exponent_bits :]}"
#
#
# numbers = {"1e-8": 1e-8, "65520": 65520.0, "1 + 1/512": 1 + 1 / 512}
# for dtype, exponent_bits in ((torch.float32, 8), (torch.bfloat16, 8), (torch.float16, 5)):
#     limits = torch.finfo(dtype)
#     span = f"at most {limits.max:.3g}, normal from {limits.tiny:.1e}"
#     print(f"{dtype}: {span}, spacing after 1: 1/{1 / limits.eps:.0f}")
#     for number in numbers.values():
#         stored = torch.tensor(number, dtype=dtype)
#         bits = bits_of(stored, exponent_bits)
#         print(f"  {number:<12.9g} is {stored.item():<14.9g} {bits}")
#
# kept = [name for name, x in numbers.items() if torch.tensor(x).half().item() == x]
# lesson.compare("float16 stores exactly", guess_kept, kept[0])

# %% [markdown]
# float16 has the finer spacing, bfloat16 the larger range. *Normal* numbers have all bits of
# the fraction; smaller ones have fewer. float16's smallest number is 6e-8, and what is below
# half of it becomes zero.
#
# ## A gradient that becomes zero
# Backward multiplies small numbers, so gradients become that small. The remedy is
# [loss scaling](../lessons/README.md#loss-scaling): multiply the loss by a large number. All
# gradients are then larger by this factor, and they are divided by it in fp32, before the
# step.

# %% tags=["active-ipynb"]
# for scale in (1, 65536):
#     weight = torch.ones((), dtype=torch.float16, requires_grad=True)
#     image = torch.tensor(0.01, dtype=torch.float16)
#     # On paper, the gradient is 0.01 × 1e-6 = 1e-8, times the scale.
#     loss = (weight * image).float() * 1e-6
#     (loss * scale).backward()
#     unscaled = weight.grad.float().item() / scale
#     print(f"scale {scale}: gradient {weight.grad.item():.1e}, divided by it {unscaled:.1e}")

# %% [markdown]
# ## Mixed precision
# A *true* precision has everything in one type: `32-true`, `bf16-true`. In a
# [*mixed* precision](../lessons/README.md#mixed-precision), `16-mixed` (float16) or
# `bf16-mixed` (bfloat16), the weights stay in fp32. Within `torch.autocast`, a list says which
# operation computes in 16 bit. Seven tensors: `logits` of a linear layer, their `tanh`,
# `softmax` and `sum`, the loss, a weight, and its gradient. How many are in float16?

# %% tags=["active-ipynb", "guess"]
# guess_half = 4  # of the seven tensors

# %% tags=["active-ipynb"]
# lesson.need(guess_half)
# with vgpu.running(1) as (gpu,):
#     model = CNN().to(gpu)
#     with torch.autocast("vgpu", torch.float16):
#         logits = model(torch.rand(8, 1, 8, 8, device=gpu))
#         loss = F.cross_entropy(logits, torch.arange(8, device=gpu))
#         tensors = {
#             "linear": logits,
#             "tanh": logits.tanh(),
#             "softmax": logits.softmax(1),
#             "sum": logits.sum(),
#             "loss": loss,
#         }
#     loss.backward()
#     tensors["weight"] = model.fc2.weight
#     tensors["its gradient"] = model.fc2.weight.grad
#
# types = [f"{name} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items()]
# print(", ".join(types[:4]), ", ".join(types[4:]), sep="\n")
# in_half = sum(t.dtype == torch.float16 for t in tensors.values())
# lesson.compare("tensors in float16", guess_half, in_half, digits=0)

# %% [markdown]
# Products are in 16 bit, and what follows them (`tanh`) keeps their type. Softmax, sums, the
# loss, the weights and their gradients are in fp32.
#
# ## Loss scaling
# This is the usual loop of mixed precision, in plain torch; the Trainer makes these calls for
# you. With `enabled=False` the scaler does nothing. A `factor` makes the loss small, and the
# learning rate large by as much: on paper it changes nothing.

# %% tags=["active-ipynb"]
# def train_80_steps(scaled, factor=1.0):
#     """(gradients of the first step, loss of the last ÷ factor), on the same 64 images."""
#     with vgpu.running(1) as (gpu,):
#         torch.manual_seed(0)
#         model = CNN().to(gpu)
#         optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / factor)
#         images, labels = (part.to(gpu) for part in train[:64])
#         scaler = torch.amp.GradScaler("vgpu", enabled=scaled)  # on a GPU: "cuda"
#         for step in range(80):
#             optimizer.zero_grad()
#             with torch.autocast("vgpu", torch.float16):  # forward and loss, no more
#                 loss = factor * F.cross_entropy(model(images), labels)
#             scaler.scale(loss).backward()
#             scaler.unscale_(optimizer)  # divides the gradients by the scale
#             if step == 0:
#                 parts = [weight.grad.flatten().cpu() for weight in model.parameters()]
#             torch.nn.utils.clip_grad_norm_(model.parameters(), factor)  # so only after it
#             scaler.step(optimizer)  # skips the step if a gradient is not finite
#             scaler.update()
#         return torch.cat(parts), loss.item() / factor

# %% [markdown]
# The next cell shows that this CNN needs no scaler with a `factor` of 1. And with 1e-5?

# %% tags=["active-ipynb", "guess"]
# guess_zeros = 10  # % of the gradients that are zero: factor 1e-5, without a scaler

# %% tags=["active-ipynb"]
# lesson.need(guess_zeros)
# for factor, scaled in ((1.0, False), (1e-5, True), (1e-5, False)):
#     gradients, loss = train_80_steps(scaled, factor)
#     zeros = 100 * (gradients == 0).float().mean().item()
#     name = f"factor {factor:g}, GradScaler {scaled}"
#     print(f"{name}: {zeros:.1f}% of the gradients are zero, loss at the end {loss:.1f}")
#
# lesson.compare("gradients that are zero", guess_zeros, zeros, unit="%", digits=0)

# %% [markdown]
# Without the scaler most gradients are zero, and the model hardly learns: guessing has a loss
# of 2.3. There is no error and no warning. With it, the factor changes nothing.
#
# How large is the scale? `GradScaler` adapts it. After an overflow it skips the step and
# halves the scale; after many good steps (here 8, by default 2,000) it doubles it. We begin
# with a scale that is too large:

# %% tags=["active-ipynb"]
# with vgpu.running(1) as (gpu,):
#     batch = [part.to(gpu) for part in train[:32]]
#     history = scales(*batch, first=2.0**26, patience=8, steps=40)
#
# draw_scales(history)

# %% [markdown]
# ## The program
# `scripts/PTL_Precision.py` has the imports and flags from the top, and the four folded cells
# of this section. Its module does not mention precision: `Trainer(precision=…)` opens
# `torch.autocast`, and scales the loss for `16-mixed`.
#
# **The module.** A step's loss is the mean over the images of all ranks, as in lesson 05. In
# `dp` each replica calls `training_step` with its shard of the batch, so the method returns a
# loss for each image, and `training_step_end` gets those of all replicas, and adds them up.


# %% jupyter={"source_hidden": true}
class LitCNN(LightningModule):
    def __init__(
        self,
        train: TensorDataset,
        test: TensorDataset,
        args: argparse.Namespace,
        batch_size: int,
    ):
        super().__init__()
        torch.manual_seed(args.seed)
        self.cnn = CNN(tuple(train[0][0].shape), data.num_classes(train, test))
        self.images = train
        self.args = args
        self.batch_size = batch_size  # global

    def train_dataloader(self) -> DataLoader:
        ranks = self.trainer.world_size
        rank = self.trainer.global_rank
        self.batch = flags.split_batch(self.batch_size, ranks)
        sampler = DistributedSampler(self.images, ranks, rank, seed=self.args.seed)
        return DataLoader(
            self.images,
            self.batch.per_micro_batch,
            sampler=sampler,
            generator=torch.Generator(),
        )

    def on_train_batch_start(self, batch: list[torch.Tensor], index: int) -> None:
        self.index = index

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.cnn(images), labels, reduction="none")

    def training_step_end(self, losses: torch.Tensor) -> torch.Tensor:
        total = len(self.images)
        rank = self.trainer.global_rank
        # The images that the sampler repeats have weight 0.
        real = data.real_rows(total, self.batch, rank, self.index, len(losses), losses.device)
        loss = (losses * real).sum()
        self.log("loss", loss / total, on_step=False, on_epoch=True, reduce_fx="sum")

        in_step = self.batch.images_in_step(self.index, total)
        return loss * self.args.loss_weight * self.batch.ranks / in_step

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        logits = self.cnn(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        self.log("test_loss", F.cross_entropy(logits, labels), batch_size=len(labels))
        self.log("test_accuracy", accuracy, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        lr = self.args.lr / self.args.loss_weight
        return torch.optim.SGD(self.parameters(), lr, momentum=0.9)


# %% [markdown]
# **The table of epochs, and the Trainer of the flags.**


# %% jupyter={"source_hidden": true}
class Table(Callback):
    """Prints the course's table of epochs, a row after each epoch."""

    def on_fit_start(self, trainer: Trainer, module: LitCNN) -> None:
        self.rows = []
        world = trainer.strategy.world
        device = trainer.strategy.device
        trainer.print(devices.describe(world, device, each=trainer.num_devices))
        strategy = trainer.strategy.name
        precision = trainer.precision_plugin.name
        trainer.print(
            f"strategy {strategy}, precision {precision}, global batch {module.batch_size}\n"
        )
        trainer.print(metrics.header(), flush=True)

    def on_train_epoch_start(self, trainer: Trainer, module: LitCNN) -> None:
        self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, module: LitCNN) -> None:
        seconds = time.perf_counter() - self.began
        row = {"epoch": trainer.current_epoch + 1}
        for name in ("loss", "test_loss", "test_accuracy"):
            row[name] = float(trainer.callback_metrics[name])
        row["images_per_s"] = len(module.images) / seconds
        metrics.check_loss(row["loss"], trainer.current_epoch, trainer.strategy.world)
        self.rows.append(row)
        trainer.print(metrics.row(row), flush=True)


def trainer_of(args: argparse.Namespace, *callbacks: Callback, **more: object) -> Trainer:
    """The Trainer that the flags describe; `more` are arguments added or replaced."""
    arguments = {
        "precision": args.precision,
        "accelerator": args.accelerator,
        "strategy": args.strategy,
        "devices": args.devices or "auto",
        "max_epochs": args.epochs,
        "callbacks": callbacks,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": False,
    }
    return Trainer(**{**arguments, **more})


# %% [markdown]
# **The run and its proof.** What must the proof compare? In 32 and 64 bit, the weights must be
# those of a serial run in the same type. In 16 bit they cannot be those of fp32, so the run
# must *learn the same*: its test loss must be within 0.005 of that of a serial run in fp32
# after each epoch, and its accuracy within 0.01 at the end.


# %% jupyter={"source_hidden": true}
def main(args: argparse.Namespace) -> None:
    count = max(launch.find_world().size, args.devices or 1)
    batch_size = flags.split_batch(args.batch_size, count, who="device").global_size
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    if args.accelerator == "vgpu":
        vgpu.start(args.devices or 1, gpu=args.gpu or "V100-16GB")
    if args.prove:
        devices.compute_exactly()  # with TF32, a 32-bit run would not be exact

    module = LitCNN(train, test, args, batch_size)
    fresh = LitCNN(train, test, args, batch_size).cnn
    table = Table()
    trainer = trainer_of(args, table)
    trainer.fit(module, val_dataloaders=DataLoader(test, batch_size=256))
    trainer.save_checkpoint(args.out / "last.ckpt")
    if not trainer.is_global_zero:
        return

    precision = trainer.precision_plugin.name
    verdict = None
    if args.prove and precision in ("32-true", "64-true"):
        images, labels = train.tensors
        same_type = TensorDataset(images.to(module.dtype), labels)
        fresh.to(devices.serial_device([module.device]), module.dtype)
        verdict = proof.compare_with_serial(
            f"{precision} equals one process",
            module.cnn,
            fresh,
            same_type,
            args,
            batch_size=batch_size,
        )
    elif args.prove:
        verdict = proof.compare_metrics_with_serial(
            f"{precision} matches fp32",
            table.rows,
            fresh,
            train,
            test,
            args,
            batch_size=batch_size,
        )
    metrics.report(
        args.out,
        trainer.strategy.world,
        trainer.strategy.device,
        table.rows,
        verdict,
        devices=trainer.num_devices * trainer.world_size,
        batch_size=batch_size,
        precision=precision,
    )


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Does the model learn the same?
# The script trains in `16-mixed` for ten epochs, and then in fp32 for the proof.

# %% tags=["active-ipynb"]
# !rm -rf results/11
# program = "OMP_NUM_THREADS=1 python ../scripts/PTL_Precision.py --prove"
# !{program} --precision 16 --accelerator vgpu --out results/11

# %% [markdown]
# It does. What if the weights are in 16 bit, too, as in `bf16-true`? First one weight, which
# gets 1,000 small steps.

# %% tags=["active-ipynb", "guess"]
# guess_sum = 2.0  # a weight of 1 in bfloat16, after 1,000 steps that add 0.001 each

# %% tags=["active-ipynb"]
# lesson.need(guess_sum)
# for dtype in (torch.float32, torch.float16, torch.bfloat16):
#     weight = torch.ones((), dtype=dtype)
#     for _ in range(1000):
#         weight += 0.001
#     print(f"{dtype}: 1 + 1,000 × 0.001 = {weight.item():.2f}")
#
# lesson.compare("the weight in bfloat16", guess_sum, weight)

# %% [markdown]
# After 1, bfloat16 has a number every 1/128, so adding less than half of that changes nothing.
# (float16's spacing is 1/1024: each 0.001 is rounded to 0.00098.)
#
# Then the CNN, in `bf16-true`, for three epochs. With the learning rate that it had above,
# 0.05, the proof holds. And with 0.01? The next cell shows how far the test loss is from that
# in fp32.

# %% tags=["active-ipynb", "guess"]
# guess_proof = "holds"  # the proof of bf16-true with 0.01: "holds" or "fails"?

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_proof, choices=("holds", "fails"))
# on_the_cpu = "--accelerator cpu --epochs 3 --out results/11-true"
# for precision, lr in (("bf16-true", 0.05), ("bf16-mixed", 0.01), ("bf16-true", 0.01)):
#     # A proof that fails ends the script with an error: after "; true" the cell goes on.
#     output = !{program} {on_the_cpu} --precision {precision} --lr {lr}; true
#     (line,) = [line for line in output if "test loss by epoch" in line]
#     print(f"{precision}, --lr {lr}: {line.partition('max ')[2]}")
#
# lesson.compare("the proof of bf16-true with 0.01", guess_proof, line.split()[-1])

# %% [markdown]
# With 0.01 many steps are too small for weights in bfloat16. Mixed precision keeps its weights
# in fp32, so it adds small steps as fp32 does. (This is SGD with momentum. The page names
# remedies for `bf16-true`, which were not tried.)
#
# ## With which strategy?
# Lightning 1 did not allow `dp` with 16 bit, "due to an issue with Apex", a library that it
# used before torch had autocast. Does this Trainer run it? The cell trains for three steps in
# `16-mixed` on one GPU, with dp and with ddp, which is called `ddp_notebook` in a notebook,
# and compares the weights with those of one GPU in fp32.

# %% tags=["active-ipynb"]
# def three_steps(strategy, count, precision, accelerator="vgpu"):
#     args = parse(["--accelerator", accelerator, "--precision", precision])
#     module = LitCNN(train, test, args, batch_size=64)
#     where = {"strategy": strategy, "devices": count}
#     trainer_of(args, max_steps=3, limit_val_batches=0, **where).fit(module)
#     return module
#
#
# with vgpu.running(2):
#     fp32 = three_steps("auto", 1, "32")
#     before = LitCNN(train, test, parse([]), batch_size=64)
#     print(f"fp32: three steps change a weight by up to {proof.difference(fp32, before):.3f}")
#     for strategy, count in (("auto", 1), ("dp", 2), ("ddp_notebook", 2)):
#         module = three_steps(strategy, count, "16")
#         near = proof.difference(module, fp32) < 0.0001
#         print(f"{strategy}, {count} of 2 GPUs, 16-mixed: within 0.0001 of fp32: {near}")

# %% [markdown]
# All three do.
#
# ## Memory
# Memory and speed are those of a CNN with 4,096 hidden units: 25.7 million weights, 98 MiB in
# fp32, trained by SGD with momentum. Memory counts weights, gradients, optimizer and
# [activations](../lessons/README.md#activation), which grow with the batch.

# %% tags=["active-ipynb", "guess"]
# guess_large = 50  # % of fp32's memory that bf16-mixed needs, at a batch of 4,096
# guess_small = 50  # the same, at a batch of 64

# %% tags=["active-ipynb"]
# lesson.need(guess_large, guess_small)
# bars = memory((64, 4096))
# for batch, guess in (("4,096", guess_large), ("64", guess_small)):
#     exact = sum(bars[f"32-true, {batch}"].values())
#     mixed = sum(bars[f"bf16-mixed, {batch}"].values())
#     print(f"batch {batch}: 32-true {exact:.0f} MiB, bf16-mixed {mixed:.0f} MiB")
#     percentage = 100 * mixed / exact
#     lesson.compare("bf16-mixed's memory", guess, percentage, unit="%", digits=0)
#
# draw_memory(bars)

# %% [markdown]
# Mixed precision keeps all that fp32 has, and autocast adds a 16-bit copy of each weight. It
# saves about half of the activations' memory. A small batch has few activations, so the copies
# need more memory than is saved. (The whole bar is metered before backward; the copies' part
# of it is computed, 2 bytes for each weight.)
#
# ## Time
# A virtual GPU has a peak rate for each type (bf16 counts as fp16, and on a V100 as fp32), and
# a product reaches a share of it that depends on its sizes. A100 and H100 can also compute
# 32-bit numbers in *TF32*, with ten bits of fraction: by torch's default in convolutions, and
# in matrix products after `torch.set_float32_matmul_precision("high")`. A launch of a kernel
# takes as long in 16 bit as in 32 bit, and each cast is one more launch that reads and writes
# memory.

# %% tags=["active-ipynb", "guess"]
# # 16-mixed on an A100 at a batch of 4,096, times as fast as fp32:
# guess_speed = 2  # by torch's default
# guess_tf32 = 2  # if fp32's matrix products run in TF32, too

# %% tags=["active-ipynb"]
# lesson.need(guess_speed, guess_tf32)
# batches = (64, 256, 1024, 4096)
# ratios = {gpu: speedups(gpu, batches) for gpu in ("V100-16GB", "A100-40GB", "H100-80GB")}
# for gpu, values in ratios.items():
#     shown = ", ".join(f"{batch:,}: {x:.1f} ×" for batch, x in zip(batches, values))
#     print(f"{gpu}, 16-mixed, simulated: {shown}")
# tf32 = speedups("A100-40GB", batches, products="high")
# shown = ", ".join(f"{batch:,}: {x:.1f} ×" for batch, x in zip(batches, tf32))
# print(f"A100-40GB, against fp32 with TF32 products: {shown}")
#
# peaks = {gpu: vgpu.GPUS[gpu].fp16 / vgpu.GPUS[gpu].fp32 for gpu in ratios}
# shown = ", ".join(f"{gpu} {peak:.0f}" for gpu, peak in peaks.items())
# print(f"fp16's peak ÷ fp32's, by the datasheets: {shown}")
# newer = ("A100-40GB", "H100-80GB")  # the GPUs with TF32
# peaks = {gpu: vgpu.GPUS[gpu].fp16 / vgpu.GPUS[gpu].tf32 for gpu in newer}
# shown = ", ".join(f"{gpu} {peak:.0f}" for gpu, peak in peaks.items())
# print(f"fp16's peak ÷ TF32's: {shown}")
#
# found = ratios["A100-40GB"][-1]
# lesson.compare("16-mixed on an A100", guess_speed, found, unit="×", digits=1)
# lesson.compare("the same, against TF32", guess_tf32, tf32[-1], unit="×", digits=1)
# draw_speedups(batches, ratios)

# %% [markdown]
# With a small batch, launches and casts take most of the time, and there is little to
# multiply: 16 bit gains nothing. (The simulated H100 even loses. But 0.9 is nearer to 1 than
# the model's error in `benchmarks/vgpu_fidelity.json`: whether a real one loses is not known.)
# With a large batch the products decide, and fp16's peak is far above fp32's. Most of the gain
# on an A100 is TF32's, too: one line gives it to a program in fp32. The page says why no GPU
# gains as much as its datasheet promises.
#
# ## Who supports what?
# What does the Trainer say to `bf16` on a V100, and to `16` on a CPU?

# %% tags=["active-ipynb"]
# with vgpu.running(1, gpu="V100-16GB"):
#     try:
#         three_steps("auto", 1, "bf16")
#     except UserError as error:
#         print(textwrap.fill(str(error), 95))
#
# with warnings.catch_warnings(record=True) as caught:
#     warnings.simplefilter("always")
#     three_steps("auto", 1, "16", "cpu")
# print(*(warning.message for warning in caught), sep="\n")

# %% [markdown]
# ## May I use it?
# | You have | Take |
# |---|---|
# | a V100 | `16-mixed`: it has no bfloat16 |
# | an A100 or H100 | `bf16-mixed`: the range of fp32, so no loss scale |
# | a CPU | `bf16-mixed`, which `16` becomes (its speed was not tried) |
# | a small batch, large weights | measure: mixed needed more memory here, and was no faster |
# | fp32 on an A100 or H100 | try `torch.set_float32_matmul_precision("high")` first |
# | several GPUs, with dp, ddp or ddp_notebook | the same as on one GPU |
#
# **Does it halve the memory and double the speed?** Only where the batch is large: it halves
# the activations, and the products are faster. Memory was metered; the speed was only
# simulated. **Does the model learn the same?** In mixed precision it does, with a loss scale
# in float16.

# %% [markdown]
# ## To go further: several updates in one block
# Normally one `torch.autocast` has one forward. Some programs, such as some GANs and
# meta-learning, have an inner loop of updates in it. Does the loss of four updates with the
# same batch fall?

# %% tags=["active-ipynb", "guess"]
# guess_inner = "falls"  # the loss of four updates inside one autocast: "falls" or "stays"?

# %% tags=["active-ipynb"]
# lesson.need(guess_inner, choices=("falls", "stays"))
# images, labels = train[:64]
#
#
# def inner_loop(**cache):
#     """The losses of four updates inside one autocast."""
#     torch.manual_seed(0)
#     model = CNN()
#     optimizer = torch.optim.SGD(model.parameters(), 0.2)
#     losses = []
#     with torch.autocast("cpu", torch.bfloat16, **cache):
#         for _ in range(4):
#             loss = F.cross_entropy(model(images), labels)
#             optimizer.zero_grad()
#             loss.backward()
#             optimizer.step()
#             losses.append(loss.item())
#     return losses
#
#
# for name, cache in (("with", {}), ("without", {"cache_enabled": False})):
#     losses = inner_loop(**cache)
#     print(f"{name} the cache:", ", ".join(f"{loss:.3f}" for loss in losses))
#
# losses = inner_loop()
# result = "stays" if losses[-1] == losses[0] else "falls"
# lesson.compare("the loss", guess_inner, result, choices=("falls", "stays"))

# %% [markdown]
# autocast has a cache: within one block each weight is cast to 16 bit once, and the copy is
# kept until the block ends. The weights change, but forward uses the old copies. There is no
# error and no warning. This Trainer and Lightning's pass `cache_enabled=False`.

# %% tags=["active-ipynb"]
# print(metrics.route_row("11 16-mixed", "results/11"))  # for the table of all routes

# %% [markdown] tags=["footer"]
# [← 10 A loss over a node's batch](PTL_NodeBatch.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/11-precision/README.md) ·
# [12 Elastic training →](PT_CNN_Elastic.ipynb)
