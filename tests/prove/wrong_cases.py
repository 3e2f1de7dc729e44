"""Faults that are planted into right programs, and what `multigpu prove` must say of each.

The programs of programs/ compute the same with one rank and with several. A fault replaces
texts of one of them. A fault of the kind "holds" is none: the program stays right.
"""

from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
RIGHT_PROGRAMS = Path(__file__).parent / "right"
# Without --local-addr, --standalone hangs if the machine's name does not resolve.
TORCHRUN = ("torchrun", "--standalone", "--local-addr=127.0.0.1")


@dataclass(frozen=True)
class Fault:
    """What is planted, and what must be found.

    program    the file in programs/ or right/, without its suffix
    replace    pairs of texts: the old one, which occurs once in the program, and the new one
    kind       the cause that must be named; "holds" if nothing must be found
    rank       the rank that differs from the others, or from what one rank computes
    parameter  the first parameter, or the buffer, that is wrong, if not all are
    step       the first optimizer step before whose update something is wrong, where it is
               not the first: rows, weights, gradients, the optimizer's options or its state;
               for a hang, the step that did not come. The first step is 1
    ranks      how many ranks the parallel run has
    exit       prove's exit code: 0 holds, 1 fails, 2 nothing can be said
    """

    name: str
    program: str
    replace: list[tuple[str, str]]
    kind: str
    rank: int | None = None
    parameter: str | None = None
    step: int | None = None
    ranks: int = 2
    exit: int = 1

    def source(self) -> str:
        """The program with the fault in it."""
        folder = PROGRAMS if (PROGRAMS / f"{self.program}.py").exists() else RIGHT_PROGRAMS
        text = (folder / f"{self.program}.py").read_text()
        for old, new in self.replace:
            assert text.count(old) == 1, f"{self.name}: {old!r} occurs {text.count(old)} times"
            text = text.replace(old, new)
        return text


def after(old: str, new: str) -> tuple[str, str]:
    """The text `old`, and `new` behind it."""
    return old, old + new


def before(old: str, new: str) -> tuple[str, str]:
    """The text `old`, and `new` in front of it."""
    return old, new + old


def holds(name: str, program: str, *replace: tuple[str, str]) -> Fault:
    return Fault(name, program, list(replace), "holds", exit=0)


ROWS = [
    Fault("sampler_not_given", "ddp", [("sampler=sampler)", "shuffle=True)")], "same_rows"),
    Fault(
        "first_rows_on_each_rank",
        "by_hand",
        [("batch[rank * share : (rank + 1) * share]", "batch[:share]")],
        "same_rows",
    ),
    Fault(
        "whole_batch_on_each_rank",  # the weights are right: the ranks do the same work twice
        "ddp",
        [("batch_size=BATCH // world, sampler=sampler)", "batch_size=BATCH, shuffle=True)")],
        "same_rows",
    ),
    Fault(
        "rest_of_batch_left_out",  # the last batch of an epoch has 31 rows
        "by_hand",
        [("ROWS, BATCH, EPOCHS = 128", "ROWS, BATCH, EPOCHS = 127")],
        "rows_missing",
        step=4,
    ),
    Fault(
        "divided_twice",  # each rank has a half of the rows, and the sampler halves them again
        "ddp",
        [("TensorDataset(x, y)", "TensorDataset(x[rank::world], y[rank::world])")],
        "rows_missing",
    ),
    Fault(
        "split_by_each_rank",  # what one rank trains with is what another one holds back
        "ddp",
        [
            (
                "data = TensorDataset(x, y)\n",
                "drawn = torch.Generator().manual_seed(rank)\n"
                "data, held_back = random_split(TensorDataset(x, y), [96, 32], drawn)\n",
            ),
            (
                "DistributedSampler, TensorDataset",
                "DistributedSampler, TensorDataset, random_split",
            ),
        ],
        "own_data_sets",
    ),
    Fault(
        "end_included",
        "by_hand",
        [("(rank + 1) * share]", "(rank + 1) * share + 1]")],
        "rows_repeated",
    ),
    Fault(
        "padded_epoch",
        "ddp",
        [("ROWS, BATCH, EPOCHS = 128", "ROWS, BATCH, EPOCHS = 127")],
        "padding",
        step=4,
    ),
    Fault(
        "rest_of_epoch_left_out",
        "ddp",
        [
            ("ROWS, BATCH, EPOCHS = 128", "ROWS, BATCH, EPOCHS = 127"),
            (
                "DistributedSampler(data, shuffle=True)",
                "DistributedSampler(data, drop_last=True)",
            ),
        ],
        "rows_dropped",
        step=4,
    ),
    Fault(
        "set_epoch_forgotten",  # one rank and two compute the same: an epoch's order tells
        "ddp",
        [("    sampler.set_epoch(epoch)\n", "")],
        "epoch_order",
        step=5,
    ),
]

WEIGHTS = [
    Fault(
        "seeds_without_broadcast",
        "by_hand",
        [
            ("torch.manual_seed(0)\n", "torch.manual_seed(rank)\n"),
            ("for p in net.parameters():\n    dist.broadcast(p.data, src=0)\n", ""),
        ],
        "initial_weights",
        rank=1,
    ),
    Fault(
        "initialized_after_ddp",
        "ddp",
        [
            after(
                "model = DDP(net)\n",
                "if rank == 0:\n    nn.init.normal_(net.head.weight, std=0.02)\n",
            )
        ],
        "initial_weights",
        rank=1,
        parameter="head.weight",
    ),
    Fault(
        "seed_from_the_number_of_ranks",
        "ddp",
        [("torch.manual_seed(0)\n", "torch.manual_seed(100 * world + rank)\n")],
        "initial_weights",
    ),
]

AVERAGES = [
    Fault("ddp_forgotten", "ddp", [("model = DDP(net)", "model = net")], "not_averaged"),
    Fault(
        "group_of_two",  # of four ranks: the ranks of a node, but not the nodes
        "ddp",
        [
            (
                "model = DDP(net)",
                "group, _ = dist.new_subgroups(group_size=min(2, world))\n"
                "model = DDP(net, process_group=group)",
            )
        ],
        "not_averaged",
        ranks=4,
    ),
    Fault(
        "reduced_to_rank_0",
        "by_hand",
        [("dist.all_reduce(p.grad)", "dist.reduce(p.grad, dst=0)")],
        "not_averaged",
        rank=1,
    ),
    Fault(
        "averaged_after_the_step",
        "by_hand",
        [
            before(
                "        for p in net.parameters():\n            dist.all_reduce",
                "        optimizer.step()\n",
            ),
            ("            p.grad /= world\n        optimizer.step()\n", ""),
        ],
        "not_averaged",
    ),
    Fault(
        "half_and_back_after_ddp",  # .half() drops the hooks of DDP from the parameters
        "ddp",
        [
            after(
                "        scheduler.step()\n",
                "    saved = net.half().state_dict()\n    net.float()\n",
            )
        ],
        "not_averaged",
        step=5,
    ),
    Fault(
        "first_micro_batch_synchronized",
        "accumulate",
        [("last = micro == micro_batches - 1", "last = micro % micro_batches == 0")],
        "wrong_micro_batch",
    ),
    Fault(
        "flag_after_forward",
        "accumulate",
        [
            (
                "        with contextlib.nullcontext() if last else model.no_sync():\n"
                "            loss = cross_entropy(model(x), y) / micro_batches\n"
                "            loss.backward()\n",
                "        loss = cross_entropy(model(x), y) / micro_batches\n"
                "        model.require_backward_grad_sync = last\n"
                "        loss.backward()\n",
            )
        ],
        "wrong_micro_batch",
    ),
    Fault(
        "scale_not_averaged",
        "by_hand",
        [
            (
                "        for p in net.parameters():\n            dist.all_reduce",
                "        for p in [*net.hidden.parameters(), *net.head.parameters()]:\n"
                "            dist.all_reduce",
            )
        ],
        "parameter_not_averaged",
        parameter="scale",
    ),
    Fault(
        "ignored_by_ddp",
        "ddp",
        [
            before(
                "model = DDP(net)",
                'DDP._set_params_and_buffers_to_ignore_for_model(net, ["head.bias"])\n',
            )
        ],
        "parameter_not_averaged",
        parameter="head.bias",
    ),
    Fault(
        "unfrozen_after_ddp",  # DDP averages what needs a gradient when it is made
        "ddp",
        [
            before("model = DDP(net)", "net.middle.requires_grad_(False)\n"),
            after(
                "    sampler.set_epoch(epoch)\n",
                "    if epoch == 1:\n        net.middle.requires_grad_(True)\n",
            ),
        ],
        "parameter_not_averaged",
        parameter="middle.weight",
        step=5,
    ),
    Fault(
        "head_outside_ddp",
        "ddp",
        [
            ("        self.head = nn.Linear(32, 10)\n", ""),
            ("return self.head(x)", "return x"),
            after("model = DDP(net)\n", "head = nn.Linear(32, 10)\n"),
            ("model.parameters()", "[*model.parameters(), *head.parameters()]"),
            ("cross_entropy(model(x), y)", "cross_entropy(head(model(x)), y)"),
        ],
        "outside_ddp",
        parameter="weight",
    ),
    Fault(
        "scale_outside_ddp",  # a parameter of no module: it has no name
        "ddp",
        [
            after("model = DDP(net)\n", "scale = nn.Parameter(torch.tensor(2.0))\n"),
            ("model.parameters()", "[*model.parameters(), scale]"),
            ("cross_entropy(model(x), y)", "cross_entropy(scale * model(x), y)"),
        ],
        "outside_ddp",
    ),
]

FACTORS = [
    Fault(
        "loss_divided_by_ranks",
        "ddp",
        [("loss.backward()", "(loss / world).backward()")],
        "divided_by_ranks",
    ),
    Fault(
        "sum_of_shares_averaged",  # AdamW: the weights hardly differ
        "tokens",
        [(" * world  # DDP divides by the number of ranks", "")],
        "divided_by_ranks",
    ),
    Fault(
        "sum_not_divided",
        "by_hand",
        [("            p.grad /= world\n", "")],
        "multiplied_by_ranks",
    ),
    Fault(
        "hook_without_division",
        "ddp",
        [
            after(
                "model = DDP(net)\n",
                "\n\ndef add(state, bucket):\n"
                "    work = dist.all_reduce(bucket.buffer(), async_op=True)\n"
                "    return work.get_future().then(lambda future: future.value()[0])\n"
                "\n\nmodel.register_comm_hook(None, add)\n",
            )
        ],
        "multiplied_by_ranks",
    ),
    Fault(
        "micro_batches_added",  # 8 with one rank, 4 with each of two
        "accumulate",
        [("cross_entropy(model(x), y) / micro_batches", "cross_entropy(model(x), y)")],
        "micro_batches_added",
    ),
    Fault(
        "micro_batches_added_in_parallel",  # one rank computes its 48 rows at once
        "accumulate",
        [
            (
                "micro_batches = BATCH // (MICRO_BATCH * world)",
                "micro_batches = 1 if world == 1 else 4\n"
                "MICRO_BATCH = BATCH // (world * micro_batches)",
            ),
            ("cross_entropy(model(x), y) / micro_batches", "cross_entropy(model(x), y)"),
        ],
        "micro_batches_added",
    ),
    Fault(
        "mean_loss_reduced",
        "ddp",
        [
            before(
                "        loss.backward()\n",
                "        dist.all_reduce(loss)\n        loss = loss / world\n",
            )
        ],
        "loss_reduced",
    ),
    Fault(
        "gathered_without_autograd",
        "contrastive",
        [
            (
                "    return torch.cat(all_gather(z)) if world > 1 else z\n",
                "    if world == 1:\n        return z\n"
                "    parts = [torch.empty_like(z) for _ in range(world)]\n"
                "    dist.all_gather(parts, z)\n"
                "    parts[rank] = z\n"
                "    return torch.cat(parts)\n",
            ),
            ("from torch.distributed.nn.functional import all_gather\n", ""),
        ],
        "gathered_constants",
    ),
    Fault(
        "sum_of_rows",
        "ddp",
        [
            ("cross_entropy(model(x), y)", 'cross_entropy(model(x), y, reduction="sum")'),
            ("lr=0.1", "lr=0.003"),
        ],
        "sum_loss",
    ),
]

# Each batch is padded to its own longest row, whose last token is no input then.
PADDED = (
    (
        "self.embedding(words) + self.position",
        "self.embedding(words) + self.position[:length]",
    ),
    (
        "        x = self.embedding",
        "        length = words.shape[1]\n        x = self.embedding",
    ),
    (
        "    x, y = words[rows, :-1], words[rows, 1:]\n"
        "    y = y.masked_fill(torch.arange(LENGTH) >= lengths[rows], PAD)\n",
        "    ids = words[rows, : int(lengths[rows].max())]\n"
        "    hidden = torch.arange(ids.shape[1]) >= lengths[rows]\n"
        "    x = ids.masked_fill(hidden, 0)[:, :-1]\n"
        "    y = ids.masked_fill(hidden, PAD)[:, 1:]\n",
    ),
)

MEANS = [
    Fault(
        "labels_of_the_first_rank",
        "contrastive",
        [
            ("a, b = map(gather, z.chunk(2))", "a, b = z.chunk(2)"),
            ("temperature * a @ b.T", "temperature * a @ gather(b).T"),
            ("torch.arange(BATCH)", "torch.arange(share)"),
        ],
        "other_loss",
        rank=1,
    ),
    Fault(
        "gathered_in_a_function",
        "contrastive",
        [
            (
                "def gather(z):\n",
                "class Gather(torch.autograd.Function):\n"
                "    @staticmethod\n"
                "    def forward(ctx, z):\n"
                "        parts = [torch.empty_like(z) for _ in range(world)]\n"
                "        dist.all_gather(parts, z.contiguous())\n"
                "        return torch.cat(parts)\n\n"
                "    @staticmethod\n"
                "    def backward(ctx, gradient):\n"
                "        return gradient.chunk(world)[rank]\n\n\n"
                "def gather(z):\n",
            ),
            ("torch.cat(all_gather(z))", "Gather.apply(z)"),
            ("a, b = map(gather, z.chunk(2))", "a, b = z.chunk(2)"),
            ("temperature * a @ b.T", "temperature * a @ gather(b).T"),
            after("torch.arange(BATCH)", "[rows]"),
        ],
        "gathered_constants",
    ),
    Fault(
        "mean_of_own_tokens",
        "tokens",
        [
            ("    dist.all_reduce(tokens)\n", ""),
            (" * world  # DDP divides by the number of ranks", ""),
        ],
        "own_mean",
    ),
    Fault(
        "uneven_last_batch",  # by this step, rounding has changed the weights
        "uneven",
        [("loss = total * world / len(batch)", "loss = total / len(mine)")],
        "own_mean",
        step=13,
    ),
    Fault(
        "row_missing_late",
        "uneven",
        [
            (
                "    for batch in order",
                "    if rank:\n        order[-2] = order[0]\n    for batch in order",
            )
        ],
        "rows_missing",
        step=13,
    ),
    Fault(
        "unequal_shares",  # the last batch of an epoch: 16 rows and 15
        "by_hand",
        [
            ("ROWS, BATCH, EPOCHS = 128", "ROWS, BATCH, EPOCHS = 127"),
            ("        share = len(batch) // world\n", ""),
            ("batch[rank * share : (rank + 1) * share]", "batch[rank::world]"),
        ],
        "own_mean",
        step=4,
    ),
    Fault("batch_norm", "norm", [("nn.GroupNorm(4, 16)", "nn.BatchNorm1d(16)")], "batch_norm"),
    Fault(
        "own_rows_standardized",  # BatchNorm without a module
        "norm",
        [
            after(
                "x = self.norm(self.conv(x)).relu().flatten(1)\n",
                "        x = (x - x.mean(0)) / (x.std(0) + 0.1)\n",
            )
        ],
        "batch_norm",
    ),
    Fault(
        "running_mean_of_own_rows",
        "norm",
        [("            dist.all_reduce(mean)\n", ""), ("mean / world", "mean")],
        "buffers",
        parameter="center",
    ),
    Fault(
        "rank_0s_gradient_in_bf16",  # rounding explains that the mean of the losses differs
        "by_hand",
        [
            ("net(data[rows])", "net(data[rows]).bfloat16()"),
            after("        loss.backward()\n", "        own = net.head.weight.grad.clone()\n"),
            before(
                "        optimizer.step()\n",
                "        dist.broadcast(own, src=0)\n        net.head.weight.grad = own\n",
            ),
        ],
        "gradients",
        parameter="head.weight",
    ),
    Fault(
        "own_queue",
        "contrast_queue",
        [("torch.cat(gathered)", "torch.cat([keys] * world)")],
        "buffers",
        parameter="queue",
    ),
    Fault(
        "optimizer_forgets_the_bias",
        "optimizer_reduces",
        [
            (
                "                own /= world\n",
                "                own /= world\n"
                "                if weight.dim() == 1:\n"
                "                    own = weight.grad.chunk(world)[rank].clone()\n",
            )
        ],
        "wrong_reduction",
        parameter="2.bias",
    ),
    Fault(
        "optimizer_adds",
        "optimizer_reduces",
        [("                own /= world\n", "")],
        "wrong_reduction",
    ),
    Fault(
        "clipped_then_averaged",
        "by_hand",
        [
            after(
                "        loss.backward()\n",
                "        nn.utils.clip_grad_norm_(net.parameters(), 0.5)\n",
            )
        ],
        "clipped_before_average",
    ),
    Fault(
        "clipped_in_no_sync",
        "clip",
        [
            (
                "    loss = mse_loss(model(x), y)\n    loss.backward()\n",
                "    with model.no_sync():\n"
                "        loss = mse_loss(model(x), y)\n        loss.backward()\n",
            ),
            before(
                "    optimizer.step()\n",
                "    for p in model.parameters():\n"
                "        dist.all_reduce(p.grad)\n        p.grad /= world\n",
            ),
        ],
        "clipped_before_average",
    ),
    Fault(
        "clamped_by_hooks",  # a tensor's hook runs before DDP averages
        "ddp",
        [
            after(
                "model = DDP(net)\n",
                "for p in net.parameters():\n"
                "    p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))\n",
            )
        ],
        "clipped_before_average",
    ),
    Fault(
        "norm_times_ranks",
        "clip",
        [("(model.parameters(), MAX_NORM)", "(model.parameters(), MAX_NORM * world)")],
        "clipping",
    ),
    Fault(
        "rank_0_clips",
        "clip",
        [
            before(
                "    clip_grad_norm_(model.parameters(), MAX_NORM)\n",
                "    if rank == 0:\n    ",
            )
        ],
        "clipping",
        rank=1,
    ),
    Fault(
        "compressed_to_8_bits",
        "ddp",
        [
            after(
                "model = DDP(net)\n",
                "\n\ndef quantize(state, bucket):\n"
                "    unit = bucket.buffer().abs().max() / 127\n"
                "    rounded = (bucket.buffer() / unit).round() * unit / world\n"
                "    work = dist.all_reduce(rounded, async_op=True)\n"
                "    return work.get_future().then(lambda future: future.value()[0])\n\n\n"
                "model.register_comm_hook(None, quantize)\n",
            )
        ],
        "compressed",
    ),
    Fault(
        "expert_without_gradient",  # a rank without a row for the expert has no gradient of it
        "by_hand",
        [
            before(
                "        self.head = nn.Linear(64, 10)\n",
                "        self.expert = nn.Linear(20, 64)\n",
            ),
            (
                "        return self.head(self.scale * self.hidden(x).tanh())\n",
                "        y = self.scale * self.hidden(x).tanh()\n"
                "        chosen = x[:, :1] > 1.7\n"
                "        if chosen.any():\n            y = y + chosen * self.expert(x)\n"
                "        return self.head(y)\n",
            ),
            (
                "            dist.all_reduce(p.grad)\n            p.grad /= world\n",
                "            grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
                "            dist.all_reduce(grad)\n            grad /= world\n",
            ),
        ],
        "missing_gradient",
        rank=1,
        parameter="expert.weight",
        step=2,
    ),
]

TEACHER = [  # a moving average of the weights, which the loss takes as a target
    after("net = Net()\n", "teacher = Net().requires_grad_(False)\n"),
    after("model = DDP(net)\n", "teacher.load_state_dict(net.state_dict())\n"),
    (
        "loss = cross_entropy(model(x), y)\n",
        "logits = model(x)\n"
        "        with torch.no_grad():\n"
        "            target = teacher(x)\n"
        "        loss = cross_entropy(logits, y) + (logits - target).square().mean()\n",
    ),
]
UPDATE = "for own, new in zip(teacher.parameters(), net.parameters()):\n"

OPTIMIZERS = [
    Fault(
        "teacher_of_rank_0",
        "ddp",
        [
            *TEACHER,
            after(
                "        scheduler.step()\n",
                f"        {UPDATE}            if rank == 0:\n"
                "                own.data = own.data.lerp(new.data, 0.1)\n",
            ),
        ],
        "frozen_weights",
        rank=1,
        parameter="Net hidden.weight",
        step=2,
    ),
    Fault(
        "second_optimizer_of_rank_0",
        "gan",
        [("    generator_optimizer.step()\n", "    rank or generator_optimizer.step()\n")],
        "step_left_out",
        rank=1,
        step=2,
    ),
    Fault("rate_times_ranks", "ddp", [after("lr=0.1", " * world")], "learning_rate"),
    Fault("rate_by_rank", "ddp", [after("lr=0.1", " * (rank + 1)")], "learning_rate", rank=1),
    Fault(
        "scheduler_steps_for_each_rank",
        "ddp",
        [before("        scheduler.step()\n", "        for _ in range(world):\n    ")],
        "scheduler",
        step=3,
    ),
    Fault(
        "rank_0_steps_the_scheduler",
        "ddp",
        [before("        scheduler.step()\n", "        if rank == 0:\n    ")],
        "scheduler",
        rank=1,
        step=4,
    ),
    Fault(
        "decay_times_ranks",
        "ddp",
        [after("weight_decay=0.01", " * world")],
        "optimizer_options",
    ),
    Fault(
        "betas_by_ranks",
        "clip",
        [after("weight_decay=0.1", ", betas=(0.9**world, 0.999**world)")],
        "optimizer_options",
    ),
    Fault(
        "rank_0_resumes",
        "clip",
        [
            before(
                "    optimizer.zero_grad()\n",
                "    if step == 5:\n        saved = optimizer.state_dict()\n"
                "        optimizer.state.clear()\n        if rank == 0:\n"
                "            optimizer.load_state_dict(saved)\n",
            )
        ],
        "optimizer_state",
        rank=1,
        step=6,
    ),
    Fault(
        "momentum_lost_between_epochs",
        "ddp",
        [
            after(
                "    sampler.set_epoch(epoch)\n",
                "    if world > 1:\n        dist.barrier()\n        optimizer.state.clear()\n",
            )
        ],
        "optimizer_state",
        step=5,
    ),
    Fault(
        "rank_0_clamps_weights",
        "ddp",
        [
            after(
                "        scheduler.step()\n",
                "        if rank == 0:\n"
                "            for p in net.parameters():\n"
                "                p.data.clamp_(-0.15, 0.15)\n",
            )
        ],
        "update",
        rank=1,
        step=2,
    ),
]

NOTHING_CAN_BE_SAID = [
    Fault(
        "optimizer_before_fsdp",  # it has the parameters that FSDP has replaced
        "fsdp1",
        [
            before("model = FSDP(\n", "optimizer = torch.optim.Adam(model.parameters())\n"),
            ("optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)\n", ""),
        ],
        "no_gradients",
        exit=2,
    ),
    Fault(
        "dropout",
        "ddp",
        [
            (
                "        self.head = nn.Linear(32, 10)\n",
                "        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 10))\n",
            )
        ],
        "random_numbers",
        exit=2,
    ),
    Fault(
        "attention_dropout",  # without a module
        "tokens",
        [before("is_causal=True", "dropout_p=0.1, ")],
        "random_numbers",
        exit=2,
    ),
    Fault(
        "own_rows_drawn",
        "by_hand",
        [
            ("torch.manual_seed(0)\n", "torch.manual_seed(rank)\n"),
            ("batch[rank * share : (rank + 1) * share]", "torch.randint(ROWS, (share,))"),
        ],
        "random_rows",
        exit=2,
    ),
    Fault(
        "seed_of_the_clock",
        "accumulate",
        [
            after("import contextlib\n", "import time\n"),
            ("torch.manual_seed(0)\n", "torch.manual_seed(time.time_ns())\n"),
        ],
        "random_reference",
        exit=2,
    ),
    Fault(
        "batch_of_each_rank",  # `--reference "… 32"` has the rows of two ranks
        "by_hand",
        [
            before("import torch\nimport torch.d", "import sys\n\n"),
            (
                "ROWS, BATCH, EPOCHS = 128, 32, 3\n",
                "ROWS, EPOCHS = 128, 3\nBATCH = int((sys.argv[1:] or [16])[0])\n",
            ),
            ("order.split(BATCH)", "order.split(BATCH * world)"),
        ],
        "fewer_rows",
        exit=2,
    ),
    Fault(
        "updated_by_hand",
        "by_hand",
        [
            ("optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)\n", ""),
            ("optimizer.zero_grad()", "net.zero_grad()"),
            ("            p.grad /= world\n", "            p.data -= 0.1 * p.grad / world\n"),
            ("        optimizer.step()\n", ""),
        ],
        "no_optimizer",
        exit=2,
    ),
    Fault(
        "one_more_step_skipped",  # half the rows, gradients twice as large: float16 overflows
        "amp",
        [("8 * torch.randn", "torch.randn"), ("init_scale=2.0**18", "init_scale=2.0**22")],
        "skipped_steps",
        exit=2,
    ),
    Fault(
        "one_rank_refused",
        "ddp",
        [before("torch.manual_seed(0)\n", 'assert world > 1, "needs 2 ranks"\n')],
        "crash",
        exit=2,
    ),
]

ENDS = [
    Fault(
        "steps_shared_by_ranks",
        "clip",
        [("for step in range(STEPS):", "for step in range(STEPS // world):")],
        "different_steps",
    ),
    Fault(
        "rank_1_leaves_out_a_step",
        "clip",
        [
            before(
                "    optimizer.step()", "    if rank == 1 and step == 3:\n        continue\n"
            )
        ],
        "step_left_out",
        rank=1,
        step=4,
    ),
    Fault(
        "rank_stops_early",
        "clip",
        [after("    scheduler.step()\n", "    if loss < 2.8:\n        break\n")],
        "different_steps",
        rank=1,
    ),
    Fault(
        "barrier_of_rank_0",
        "ddp",
        [after("        scheduler.step()\n", "    if rank == 0:\n        dist.barrier()\n")],
        "hang",
        exit=2,
        step=5,
    ),
    Fault("crash_of_rank_1", "ddp", [("lr=0.1", "lr=[0.1][rank]")], "crash", rank=1, exit=2),
    Fault(
        "unused_parameters",  # DDP's own error, in the next forward of the rank without
        "ddp",
        [
            before("        self.middle =", "        self.expert = nn.Linear(20, 64)\n"),
            (
                "        x = self.hidden(x).relu()\n",
                "        chosen = x[:, :1] > 1.2\n"
                "        expert = chosen * self.expert(x) if chosen.any() else 0\n"
                "        x = self.hidden(x).relu() + expert\n",
            ),
        ],
        "crash",
        exit=2,
        rank=0,
    ),
]

CLOSURE = (
    "        loss = cross_entropy(model(x), y)\n"
    "        optimizer.zero_grad()\n"
    "        loss.backward()\n"
    "        optimizer.step()\n",
    "\n        def closure(x=x, y=y):\n"
    "            optimizer.zero_grad()\n"
    "            loss = cross_entropy(model(x), y)\n"
    "            loss.backward()\n"
    "            return loss\n\n"
    "        optimizer.step(closure)\n",
)

RIGHT = [
    holds("padded_tokens", "tokens", *PADDED),
    # With one rank it shuffles otherwise, and reads half as much: the reference is made to.
    holds(
        "sampler_of_several_ranks_alone",
        "ddp",
        (
            "sampler = DistributedSampler(data, shuffle=True)\n",
            "sampler = DistributedSampler(data) if world > 1 else None\n",
        ),
        (
            "batch_size=BATCH // world, sampler=sampler)",
            "batch_size=BATCH, shuffle=sampler is None, sampler=sampler)",
        ),
        (
            "    sampler.set_epoch(epoch)\n",
            "    if sampler:\n        sampler.set_epoch(epoch)\n",
        ),
    ),
    *(holds(path.stem, path.stem) for path in sorted(PROGRAMS.glob("*.py"))),
    holds("other_seed", "ddp", ("torch.manual_seed(0)\n", "torch.manual_seed(1234)\n")),
    # prove seeds each process before the program does.
    holds("no_seed", "ddp", ("torch.manual_seed(0)\n", "")),
    holds(
        "seed_of_the_rank", "by_hand", ("torch.manual_seed(0)\n", "torch.manual_seed(rank)\n")
    ),
    holds(
        "adamw",
        "ddp",
        ("torch.optim.SGD", "torch.optim.AdamW"),
        ("lr=0.1, momentum=0.9", "lr=0.01"),
    ),
    # Gradients that are zero but for rounding, which Adam makes as large as the others.
    holds("bias_of_keys", "tokens", ("3 * WIDTH, bias=False)", "3 * WIDTH)")),
    holds("bias_before_norm", "norm", ("GroupNorm(4, 16)", "GroupNorm(16, 16)")),
    holds(
        "bias_before_norm_with_adam",
        "norm",
        ("GroupNorm(4, 16)", "GroupNorm(16, 16)"),
        (
            "SGD(model.parameters(), lr=0.05, momentum=0.9)",
            "Adam(model.parameters(), lr=0.01)",
        ),
    ),
    holds(
        "teacher",
        "ddp",
        *TEACHER,
        after(
            "        scheduler.step()\n",
            f"        {UPDATE}            own.data.lerp_(new.data, 0.1)\n",
        ),
    ),
    holds("high_rate", "ddp", ("lr=0.1", "lr=6.0"), ("gamma=0.5", "gamma=1.0")),
    holds("static_graph", "ddp", ("DDP(net)", "DDP(net, static_graph=True)")),
    holds("find_unused", "ddp", ("DDP(net)", "DDP(net, find_unused_parameters=True)")),
    holds(
        "unused_on_a_rank",
        "ddp",
        ("DDP(net)", "DDP(net, find_unused_parameters=True)"),
        (
            "        x = self.hidden(x).relu()\n",
            "        chosen = x[:, :1] > 1.7\n"
            "        expert = chosen * self.expert(x) if chosen.any() else 0\n"
            "        x = self.hidden(x).relu() + expert\n",
        ),
        before("        self.middle =", "        self.expert = nn.Linear(20, 64)\n"),
    ),
    holds("views_of_buckets", "ddp", ("DDP(net)", "DDP(net, gradient_as_bucket_view=True)")),
    holds("small_buckets", "ddp", ("DDP(net)", "DDP(net, bucket_cap_mb=0.004)")),
    holds(
        "allreduce_hook",
        "ddp",
        before(
            "from torch.nn.functional import cross_entropy\n",
            "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n",
        ),
        after(
            "model = DDP(net)\n",
            "model.register_comm_hook(None, default_hooks.allreduce_hook)\n",
        ),
    ),
    # Each rank's gradient is rounded to float16, and one rank's, too.
    holds(
        "float16_hook",
        "ddp",
        before(
            "from torch.nn.functional import cross_entropy\n",
            "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n",
        ),
        after(
            "model = DDP(net)\n",
            "model.register_comm_hook(None, default_hooks.fp16_compress_hook)\n",
        ),
    ),
    holds(
        "two_optimizers",
        "ddp",
        (
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1",
            "other = torch.optim.Adam(net.hidden.parameters(), lr=0.01)\n"
            "rest = [*net.middle.parameters(), *net.head.parameters()]\n"
            "optimizer = torch.optim.SGD(rest, lr=0.1",
        ),
        ("        optimizer.zero_grad()\n", "        model.zero_grad()\n"),
        after("        optimizer.step()\n", "        other.step()\n"),
    ),
    holds(
        "tied_weights",
        "tokens",
        after("net = GPT()\n", "net.head.weight = net.embedding.weight\n"),
    ),
    holds(
        "frozen_layer", "ddp", before("model = DDP(net)", "net.hidden.requires_grad_(False)\n")
    ),
    holds(
        "drop_last",  # 127 rows: the ranks drop what one rank drops
        "ddp",
        ("ROWS, BATCH, EPOCHS = 128", "ROWS, BATCH, EPOCHS = 127"),
        ("shuffle=True)", "shuffle=True, drop_last=True)"),
        ("sampler=sampler)", "sampler=sampler, drop_last=True)"),
    ),
    # DDP decides in forward: each micro-batch is synchronized, which is slow, and right.
    holds(
        "no_sync_around_backward",
        "accumulate",
        (
            "        with contextlib.nullcontext() if last else model.no_sync():\n"
            "            loss = cross_entropy(model(x), y) / micro_batches\n",
            "        loss = cross_entropy(model(x), y) / micro_batches\n"
            "        with contextlib.nullcontext() if last else model.no_sync():\n",
        ),
    ),
    holds(
        "all_micro_batches_synchronized",
        "accumulate",
        ("last = micro == micro_batches - 1", "last = True"),
    ),
    holds(
        "sum_over_the_batch",
        "by_hand",
        ("labels[rows])", 'labels[rows], reduction="sum") / len(batch)'),
        ("            p.grad /= world\n", ""),
    ),
    holds(
        "averaged_in_one_piece",
        "by_hand",
        (
            "        for p in net.parameters():\n"
            "            dist.all_reduce(p.grad)\n            p.grad /= world\n",
            "        grads = [p.grad for p in net.parameters()]\n"
            "        flat = nn.utils.parameters_to_vector(grads) / world\n"
            "        dist.all_reduce(flat)\n"
            "        nn.utils.vector_to_parameters(flat, grads)\n",
        ),
    ),
    holds(
        "weights_broadcast_in_each_epoch",
        "by_hand",
        before(
            "    order = ",
            "    for p in net.parameters():\n        dist.broadcast(p.data, 0)\n",
        ),
    ),
    # Each rank has the whole loss, so its gradient of the temperature is the whole one.
    holds(
        "temperature_outside_ddp",
        "contrastive",
        ("        self.temperature = nn.Parameter(torch.tensor(2.0))\n", ""),
        (
            "return normalize(self.body(x)), self.temperature.exp()",
            "return normalize(self.body(x))",
        ),
        after("model = DDP(Encoder())\n", "temperature = nn.Parameter(torch.tensor(2.0))\n"),
        ("model.parameters()", "[*model.parameters(), temperature]"),
        ("z, temperature = model", "z = model"),
        ("logits = temperature * a", "logits = temperature.exp() * a"),
    ),
    holds(
        "own_queries",  # a rank's loss: its own rows among all ranks' keys
        "contrastive",
        ("a, b = map(gather, z.chunk(2))", "a, b = z.chunk(2)"),
        ("temperature * a @ b.T", "temperature * a @ gather(b).T"),
        after("torch.arange(BATCH)", "[rows]"),
    ),
    holds(
        "zero_redundancy",
        "clip",
        before(
            "from torch.nn.functional import mse_loss\n",
            "from torch.distributed.optim import ZeroRedundancyOptimizer\n",
        ),
        (
            "torch.optim.AdamW(model.parameters(), lr",
            "ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr",
        ),
    ),
    holds("closure", "ddp", CLOSURE),
    # LBFGS takes differences of gradients, which enlarge what rounding does.
    holds(
        "lbfgs",
        "ddp",
        CLOSURE,
        (
            "SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)",
            "LBFGS(model.parameters(), lr=0.1, max_iter=3)",
        ),
    ),
    # Each row's opposite is in the batch: a bias's gradient is zero but for rounding, with one
    # rank exactly zero. Adam makes large steps of it.
    holds(
        "adam_on_rounding",
        "clip",
        (
            "data = torch.randn(STEPS, BATCH, 20, generator=generator)\n",
            "data = torch.randn(STEPS, BATCH // 2, 20, generator=generator)\n"
            "data = torch.cat([data, -data], 1)\n",
        ),
        (
            "targets = data.square().sum(2, keepdim=True) / 10 + data[..., :1]",
            "targets = data[..., :1] ** 3",
        ),
        ("nn.GELU", "nn.Tanh"),
        before(
            "optimizer = torch", "for i in (0, 2):\n    nn.init.zeros_(model.module[i].bias)\n"
        ),
    ),
    Fault("four_ranks", "ddp", [], "holds", ranks=4, exit=0),
    Fault("micro_batches_of_four_ranks", "accumulate", [], "holds", ranks=4, exit=0),
    holds("bfloat16", "amp", ("torch.float16", "torch.bfloat16")),
]

# In programs that shard: FSDP2, tensor parallelism, both, and a pipeline.
GATHER = """

class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()]


"""
SHARDED = [
    Fault(
        "shards_divided_twice",
        "fsdp2",
        [("        loss.backward()\n", "        (loss / world).backward()\n")],
        "divided_by_ranks",
    ),
    Fault(
        "shards_added_behind_clipping",
        "fsdp2",
        [
            after(
                "fully_shard(model, mesh=mesh, mp_policy=policy)\n",
                "for module in [*model[1:3], model]:\n"
                "    module.set_gradient_divide_factor(1.0)\n",
            )
        ],
        "multiplied_by_ranks",
    ),
    Fault(
        "parts_added",
        "zero_by_hand",
        [("part(weight.grad) / world", "part(weight.grad)")],
        "multiplied_by_ranks",
    ),
    Fault(
        "own_parts",
        "zero_by_hand",
        [("            dist.all_reduce(weight.grad)\n", ""), (" / world\n", "\n")],
        "gradients",
    ),
    Fault(
        "shards_of_the_same_rows",
        "fsdp2",
        [("[rank::world]", "[: 16 // world]")],
        "same_rows",
    ),
    Fault(
        "norm_of_a_shard",
        "fsdp1",
        [
            (
                "model.clip_grad_norm_(1.0)",
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)",
            )
        ],
        "clipped_before_average",
    ),
    Fault(
        "each_rank_of_a_layer_draws_rows",
        "tensor_parallel",
        [before("tokens = torch.randint", "torch.manual_seed(mesh.get_rank())\n")],
        "group_rows",
        rank=1,
        exit=2,
    ),
    Fault(
        "tokens_of_both_ranks_counted",  # and the loss is reduced for printing, after backward
        "tensor_parallel",
        [("loss.backward()", "(loss / mesh.size()).backward()\n    dist.all_reduce(loss)")],
        "divided_by_ranks",
    ),
    Fault(
        "norm_of_a_part_of_the_sequence",
        "tensor_parallel",
        [
            ("WIDTH, HEAD_WIDTH = 32, 8\n\n\n", f"WIDTH, HEAD_WIDTH = 32, 8\n{GATHER}"),
            (
                "h = self.norm1(x)",
                "part = x.chunk(dist.get_world_size(), 1)[dist.get_rank()]\n"
                "        h = Gather.apply(self.norm1(part))",
            ),
        ],
        "parameter_not_averaged",
        parameter="0.weight",
    ),
    Fault(
        "bias_of_each_rank",  # a bias is added on each rank, and then the outputs are added up
        "tensor_parallel",
        [
            (
                "x = x + self.o(attended.transpose(1, 2).flatten(2))",
                "x = x + self.o(attended.transpose(1, 2).flatten(2))\n"
                "        x = x + (dist.get_world_size() - 1) * self.norm1.weight",
            )
        ],
        "shared_layer",
    ),
    Fault(
        "rate_of_tensor_parallel_ranks",
        "tensor_parallel",
        [("lr=1e-3", "lr=1e-3 * mesh.size()")],
        "learning_rate",
    ),
    Fault(
        "rows_by_rank_and_not_by_pair",
        "two_d",
        [("chunk(dp_size)[dp_rank]", 'chunk(world)[int(os.environ["RANK"])]')],
        "group_rows",
        rank=1,
        ranks=4,
    ),
    Fault(
        "pairs_not_averaged",
        "two_d",
        [
            (
                "    if dp_size > 1:\n"
                '        fully_shard(block, mesh=mesh["dp"])\n'
                "if dp_size > 1:\n"
                '    fully_shard(model, mesh=mesh["dp"])\n',
                "",
            )
        ],
        "not_averaged",
        ranks=4,
    ),
    Fault(
        "micro_batches_of_a_pipeline_added",
        "pipeline",
        [("loss_fn=F.cross_entropy)", "loss_fn=F.cross_entropy, scale_grads=False)")],
        "micro_batches_added",
    ),
    Fault(
        "norm_of_a_stage",
        "pipeline",
        [
            before(
                "    optimizer.step()\n",
                "    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)\n",
            )
        ],
        "clipped_before_average",
    ),
    Fault(
        "labels_of_another_batch",
        "pipeline",
        [("labels[step].to", "labels[(step + (world > 1)) % 6].to")],
        "gradients",
    ),
]

FAULTS = [
    *ROWS,
    *WEIGHTS,
    *AVERAGES,
    *FACTORS,
    *MEANS,
    *OPTIMIZERS,
    *NOTHING_CAN_BE_SAID,
    *ENDS,
    *SHARDED,
    *RIGHT,
]
