"""Known answers of lesson 09."""

from known import Known

STEP = """# answer: training_step
class Exact(Module):
    def training_step(self, batch, batch_idx):
        rows, labels = batch
"""
GRADIENT = "5 rows and 3"
LOGGED = "what is logged"
RANKS = "other ranks"
NO_ROW = "no row"

STOP = """# answer: early_stopping
class StopEarly:
    def __init__(self, patience):
        self.patience = patience
        self.best = float("inf")
        self.waited = 0

    def on_validation_end(self, trainer, module):
"""
MEAN = """        mean = trainer.callback_metrics["test_loss"].clone()
        dist.all_reduce(mean)
        loss = mean.item() / dist.get_world_size()
"""
BEST = """        if loss < self.best:
            self.best = loss
            self.waited = 0
        else:
            self.waited += 1
"""
ONE_RANK = "a loss rises on one rank"
RISES = "the mean rises"
LOSSES = "other losses"

FIT = """# answer: accumulation
class AccumulatingTrainer:
    def __init__(self, max_epochs, accumulate):
        self.max_epochs = max_epochs
        self.accumulate = accumulate
        self.global_step = 0

    def fit(self, module, batches):
        optimizer = module.configure_optimizers()
"""
EVEN = "8 batches in groups of 4"
UNEVEN = "10 batches in groups of 4"
EPOCHS = "other epochs"

KNOWN = [
    Known(
        "the last groups are forgotten",
        "guess_steps",
        "# answer: guess_steps\nguess_steps = 6\n",
        ("the Trainer's global_step",),
    ),
    Known(
        "an object that equals every number",
        "guess_steps",
        "# answer: guess_steps\n"
        "class Any(int):\n"
        "    def __eq__(self, other):\n"
        "        return True\n"
        "guess_steps = Any(1)\n",
        ("the Trainer's global_step",),
    ),
    # ---- training_step ----------------------------------------------------------------------
    Known(
        "the mean over own rows",
        "training_step",
        STEP
        + """        loss = F.cross_entropy(self.net(rows), labels)
        sums = torch.tensor([loss.item() * len(rows), len(rows)])
        dist.all_reduce(sums)
        self.log("loss", (sums[0] / sums[1]).item())
        return loss
""",
        (GRADIENT, RANKS, NO_ROW),
    ),
    Known(
        "not multiplied by the number of ranks",
        "training_step",
        STEP
        + """        own = F.cross_entropy(self.net(rows), labels, reduction="sum")
        sums = torch.tensor([own.item(), len(rows)])
        dist.all_reduce(sums)
        self.log("loss", (sums[0] / sums[1]).item())
        return own / sums[1]
""",
        (GRADIENT, RANKS, NO_ROW),
    ),
    Known(
        "logs the loss of one rank",
        "training_step",
        STEP
        + """        own = F.cross_entropy(self.net(rows), labels, reduction="sum")
        total = torch.tensor(float(len(rows)))
        dist.all_reduce(total)
        self.log("loss", own.item() / max(1, len(rows)))
        return own * dist.get_world_size() / total
""",
        (LOGGED, RANKS, NO_ROW),
    ),
    Known(
        "only rank 0 asks for the number of rows",
        "training_step",
        STEP
        + """        own = F.cross_entropy(self.net(rows), labels, reduction="sum")
        sums = torch.tensor([own.item(), len(rows)])
        if dist.get_rank() == 0:
            dist.all_reduce(sums)
        self.log("loss", (sums[0] / sums[1]).item())
        return own * dist.get_world_size() / sums[1]
""",
        (GRADIENT, LOGGED, RANKS, NO_ROW),
    ),
    Known(
        "gathers the rows of all ranks",
        "training_step",
        STEP
        + """        size = dist.get_world_size()
        padded = torch.zeros(16, 5)
        padded[: len(rows), :4] = rows
        padded[: len(rows), 4] = labels + 1.0
        parts = [torch.empty(16, 5) for _ in range(size)]
        dist.all_gather(parts, padded)
        everything = torch.cat(parts)
        everything = everything[everything[:, 4] > 0]
        labels = everything[:, 4].long() - 1
        loss = F.cross_entropy(self.net(everything[:, :4]), labels)
        self.log("loss", loss.item())
        return loss
""",
        (GRADIENT,),
    ),
    Known(
        "right for two ranks only",
        "training_step",
        STEP
        + """        own = F.cross_entropy(self.net(rows), labels, reduction="sum")
        sums = torch.tensor([own.item(), len(rows)])
        dist.all_reduce(sums)
        self.log("loss", (sums[0] / sums[1]).item())
        return own * 2 / sums[1]
""",
        (RANKS,),
    ),
    Known(
        "NaN without a row",
        "training_step",
        STEP
        + """        mean = F.cross_entropy(self.net(rows), labels)
        sums = torch.tensor([mean.item() * len(rows), len(rows)])
        dist.all_reduce(sums)
        self.log("loss", (sums[0] / sums[1]).item())
        return mean * len(rows) * dist.get_world_size() / sums[1]
""",
        (NO_ROW,),
    ),
    Known(
        "gathers the counts",
        "training_step",
        "# answer: training_step\nfrom torch.nn.functional import nll_loss\n\n"
        + STEP.partition("\n")[2]
        + """        logarithms = self.net(rows).log_softmax(1)
        loss = nll_loss(logarithms, labels, reduction="none").sum()
        size = dist.get_world_size()
        numbers = [torch.zeros(2, dtype=torch.float64) for _ in range(size)]
        mine = torch.tensor([float(loss), float(len(labels))], dtype=torch.float64)
        dist.all_gather(numbers, mine)
        total, count = (sum(each[i].item() for each in numbers) for i in range(2))
        self.log("loss", torch.tensor(total / count))
        return loss / (count / size)
""",
    ),
    # ---- early_stopping ---------------------------------------------------------------------
    Known(
        "each rank looks at its own loss",
        "early_stopping",
        STOP
        + """        loss = trainer.callback_metrics["test_loss"].item()
"""
        + BEST
        + """        trainer.should_stop = self.waited >= self.patience
""",
        (ONE_RANK, RISES, LOSSES),
    ),
    Known(
        "rank 0 decides, and tells nobody",
        "early_stopping",
        STOP
        + MEAN
        + BEST
        + """        if dist.get_rank() == 0:
            trainer.should_stop = self.waited >= self.patience
""",
        (ONE_RANK, RISES, LOSSES),
    ),
    Known(
        "one rank's loss ends the training of all",
        "early_stopping",
        STOP
        + """        loss = trainer.callback_metrics["test_loss"].item()
"""
        + BEST
        + """        stop = torch.tensor(int(self.waited >= self.patience))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        trainer.should_stop = bool(stop)
""",
        (ONE_RANK, LOSSES),
    ),
    Known(
        "all ranks' own losses must agree on the end",
        "early_stopping",
        STOP
        + """        loss = trainer.callback_metrics["test_loss"].item()
"""
        + BEST
        + """        stop = torch.tensor(int(self.waited >= self.patience))
        dist.all_reduce(stop, op=dist.ReduceOp.MIN)
        trainer.should_stop = bool(stop)
""",
        (RISES, LOSSES),
    ),
    Known(
        "never stops",
        "early_stopping",
        STOP + "        trainer.should_stop = False\n",
        (ONE_RANK, RISES, LOSSES),
    ),
    Known(
        "the counter is not set back",
        "early_stopping",
        STOP
        + MEAN
        + """        if loss < self.best:
            self.best = loss
        else:
            self.waited += 1
        trainer.should_stop = self.waited >= self.patience
""",
        (LOSSES,),
    ),
    Known(
        "rank 0 decides, and broadcasts",
        "early_stopping",
        """# answer: early_stopping
class StopEarly:
    def __init__(self, patience):
        self.patience = patience
        self.means = []

    def on_validation_end(self, trainer, module):
        own = trainer.callback_metrics["test_loss"].reshape(1)
        everyone = [torch.empty(1) for _ in range(trainer.ranks)]
        dist.gather(own, everyone if dist.get_rank() == 0 else None)
        stop = torch.zeros(1)
        if dist.get_rank() == 0:
            self.means.append(float(sum(everyone)))
            best = self.means.index(min(self.means))
            stop += len(self.means) - 1 - best >= self.patience
        dist.broadcast(stop, 0)
        trainer.should_stop = bool(stop)
""",
    ),
    # ---- accumulation -----------------------------------------------------------------------
    Known(
        "the last group is lost",
        "accumulation",
        FIT
        + """        for _ in range(self.max_epochs):
            optimizer.zero_grad()
            for number, batch in enumerate(batches, 1):
                (module.training_step(batch, number) / self.accumulate).backward()
                if number % self.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    self.global_step += 1
""",
        (UNEVEN, EPOCHS),
    ),
    Known(
        "the loss is not divided",
        "accumulation",
        FIT
        + """        for _ in range(self.max_epochs):
            for number, batch in enumerate(batches, 1):
                module.training_step(batch, number).backward()
                if number % self.accumulate == 0 or number == len(batches):
                    optimizer.step()
                    optimizer.zero_grad()
                    self.global_step += 1
""",
        (EVEN, UNEVEN, EPOCHS),
    ),
    Known(
        "the last group is divided by its own length",
        "accumulation",
        FIT
        + """        for _ in range(self.max_epochs):
            for start in range(0, len(batches), self.accumulate):
                group = batches[start : start + self.accumulate]
                for batch in group:
                    (module.training_step(batch, 0) / len(group)).backward()
                optimizer.step()
                optimizer.zero_grad()
                self.global_step += 1
""",
        (UNEVEN, EPOCHS),
    ),
    Known(
        "global_step counts batches",
        "accumulation",
        FIT
        + """        for _ in range(self.max_epochs):
            for number, batch in enumerate(batches, 1):
                self.global_step += 1
                (module.training_step(batch, number) / self.accumulate).backward()
                if number % self.accumulate == 0 or number == len(batches):
                    optimizer.step()
                    optimizer.zero_grad()
""",
        (EVEN, UNEVEN, EPOCHS),
    ),
    Known(
        "right for groups of 4 only",
        "accumulation",
        FIT
        + """        for _ in range(self.max_epochs):
            for number, batch in enumerate(batches, 1):
                (module.training_step(batch, number) / 4).backward()
                if number % 4 == 0 or number == len(batches):
                    optimizer.step()
                    optimizer.zero_grad()
                    self.global_step += 1
""",
        (EPOCHS,),
    ),
    Known(
        "group by group, with the gradients of a sum",
        "accumulation",
        FIT
        + """        starts = range(0, len(batches), self.accumulate)
        for start in [start for _ in range(self.max_epochs) for start in starts]:
            group = batches[start : start + self.accumulate]
            losses = [module.training_step(batch, index) for index, batch in enumerate(group)]
            optimizer.zero_grad()
            sum(losses).div(self.accumulate).backward()
            optimizer.step()
            self.global_step += 1
""",
    ),
]
