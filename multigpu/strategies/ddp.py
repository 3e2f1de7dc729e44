"""ddp: a process a device, each with a full copy of the model; the gradients are averaged during backward.

It is torch's own DistributedDataParallel. Lesson 05 uses it by hand.
"""

import atexit
import re
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from multigpu import devices, rendezvous
from multigpu.errors import UserError, pluralize
from multigpu.launch import relaunch
from multigpu.launch.world import World, find
from multigpu.strategies.accelerators import resolve
from multigpu.strategies.base import Strategy

# How each launcher is told the number of ranks on a node, and of nodes.
RANKS_FLAG = {"torchrun": "--nproc-per-node={}", "srun": "#SBATCH --ntasks-per-node={}"}
NODES_FLAG = {"torchrun": "--nnodes={}", "srun": "#SBATCH --nodes={}"}


class DDPStrategy(Strategy):
    """DistributedDataParallel, under torchrun, srun, mpirun, horovodrun, or by starting the script again.

    process_group_backend   "nccl", "gloo", …; None: by the hardware
    timeout                 how long a collective waits for a rank
    ddp_comm_hook, ddp_comm_state   as DistributedDataParallel.register_comm_hook takes them
    **keywords              DistributedDataParallel's own: find_unused_parameters, static_graph, bucket_cap_mb …
    """

    name = "ddp"
    processes_per_node: int | None = None  # None: one a device

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        ddp_comm_hook: Callable | None = None,
        ddp_comm_state: object = None,
        **keywords: Any,
    ):
        super().__init__()
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self.ddp_comm_hook, self.ddp_comm_state = ddp_comm_hook, ddp_comm_state
        self.keywords = keywords
        self.connected = False
        self._control: dist.ProcessGroup | None = None
        self.after_forward: Callable[[], None] | None = None
        self.averaged: dict[
            nn.Parameter, str
        ] = {}  # whose gradients are averaged, with their names

    # ---- the processes ------------------------------------------------------------------------------------------

    def ranks_on_node(self) -> int | None:
        """How many ranks this strategy wants on a node; None: as many as the launcher started."""
        return self.processes_per_node or (
            self.accelerator.count if self.accelerator else None
        )

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        wanted = self.ranks_on_node() or 1
        if self.find().launcher == "python" and wanted * self.num_nodes > 1:
            self.start(wanted)
        return function(*args)

    def find(self) -> World:
        """This process's place. Slurm must have given the node as many GPUs as its processes take together."""
        return find(
            gpus_each=self.accelerator.count or 1
            if self.processes_per_node and self.accelerator
            else 1
        )

    def start(self, processes: int) -> None:
        """Without a launcher: this process becomes rank 0, and the script is started again for the others."""
        if self.num_nodes > 1:
            raise UserError(
                f"num_nodes={self.num_nodes}, and no launcher has started ranks on other nodes: start the script on each with "
                f"`torchrun --nnodes={self.num_nodes} --nproc-per-node={processes} …`, or with srun in a Slurm job."
            )
        relaunch.start_again(processes)

    def connect(self) -> None:
        if self.connected and dist.is_initialized():
            return
        self.accelerator = self.accelerator or resolve()
        self.world = self.find()
        self._refuse_a_mismatch(self.world)
        self.device = self.accelerator.of_rank(self.world)
        self.devices = [self.device]
        if not dist.is_initialized():
            self.init_dist_connection()
            _groups.append(dist.group.WORLD)
            atexit.register(_disconnect)
        if dist.get_backend() == "nccl":
            self._control = dist.new_group(backend="gloo", timeout=self.timeout)
        self.connected = True
        Strategy.met = Strategy.met or self.world.size > 1

    def init_dist_connection(self) -> None:
        """Start the process group. Override it for a way of your own; `self.world` and `self.device` are known."""
        dist.init_process_group(
            self.process_group_backend or devices.backend(self.device), store=rendezvous.meet(self.world, self.device),
            rank=self.world.rank, world_size=self.world.size, timeout=self.timeout,
        )  # fmt: skip

    def _refuse_a_mismatch(self, world: World) -> None:
        """What the Trainer was told and what the launcher did must agree: else ranks wait for ranks that nobody starts."""
        quiet, wanted = world.rank != 0, self.ranks_on_node()
        what = (
            pluralize(wanted or 0, "rank") + " a node"
            if self.processes_per_node
            else pluralize(wanted or 0, "device")
        )
        if wanted is not None and wanted != world.local_size:
            flag = RANKS_FLAG.get(world.launcher, "-np {}").format(wanted * (world.nodes if "-np" in RANKS_FLAG.get(world.launcher, "-np") else 1))  # fmt: skip
            other = "" if self.processes_per_node else f", or devices={world.local_size}"
            raise UserError(
                f"strategy {self.name!r} wants {what}, but {world.launcher} started {pluralize(world.local_size, 'rank')} "
                f"on this node: write '{flag}'{other}.",
                quiet,
            )
        if self.num_nodes > 1 and self.num_nodes != world.nodes:
            flag = NODES_FLAG.get(world.launcher, "ranks on {} nodes").format(self.num_nodes)
            raise UserError(
                f"num_nodes={self.num_nodes}, but {world.launcher} started ranks on {pluralize(world.nodes, 'node')}: "
                f"write '{flag}', or num_nodes={world.nodes}.",
                quiet,
            )

    @property
    def control(self) -> dist.ProcessGroup | None:
        if self.world.size == 1 or not self.connected:
            return None
        return self._control or dist.group.WORLD

    # ---- the model ----------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        return self.distributed(model)

    def distributed(self, model: nn.Module) -> nn.Module:
        """The model in DistributedDataParallel; as it is if nothing in it learns."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        wrapped = self.configure_ddp(
            model, [self.device.index] if self.device.type == "cuda" else None
        )
        if self.ddp_comm_hook is not None:
            wrapped.register_comm_hook(self.ddp_comm_state, self.ddp_comm_hook)
        if isinstance(wrapped, DistributedDataParallel):
            _wrapped.add(wrapped)
            self.averaged = learning(model)
            if self.manual:
                self._backwards_are_within(wrapped)
        return wrapped

    def start_epoch(self, model: nn.Module) -> None:
        """Raises UserError if other parameters learn than when `wrap` was called: those are averaged, and DDP waits for them."""
        wrapped = isinstance(model, DistributedDataParallel)
        if (
            not self.averaged
            or self.world.size == 1
            or (wrapped and not model.require_backward_grad_sync)
        ):
            return
        now = learning(model)
        thawed = [name for parameter, name in now.items() if parameter not in self.averaged]
        frozen = [name for parameter, name in self.averaged.items() if parameter not in now]
        quiet = self.world.rank != 0
        if thawed:
            also = (
                ", or with find_unused_parameters=True freeze it in on_train_start"
                if wrapped
                else ""
            )
            raise UserError(
                f"{self.name} averages the gradients of what learned when fit began, and {_first(thawed)} learns only since then, "
                f"so each rank would learn it alone: let it learn from the start, with the learning rate 0 until its time{also}; "
                f"or call fit again.",
                quiet,
            )
        if frozen and wrapped and not (model.find_unused_parameters or model.static_graph):
            raise UserError(
                f"{self.name} waits for the gradients of what learned when fit began, and {_first(frozen)} is frozen since then: "
                f"give DDPStrategy(find_unused_parameters=True), set its learning rate to 0 instead, or call fit again.",
                quiet,
            )

    def _backwards_are_within(self, wrapped: DistributedDataParallel) -> None:
        """At its forward's end DDP begins to wait for gradients, which have come by then: `before_backward` does it."""
        synchronised: list[bool] = []

        def pause(*_: Any) -> None:
            synchronised.append(wrapped.require_backward_grad_sync)
            wrapped.require_backward_grad_sync = False

        def go_on(*_: Any) -> None:
            wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = (
                synchronised.pop()
            )

        wrapped.module.register_forward_hook(pause)
        wrapped.register_forward_hook(go_on)
        self.after_forward = go_on

    def detach(self) -> None:
        self.after_forward, self.averaged = None, {}  # they hold the wrapper, and the model

    def configure_ddp(self, model: nn.Module, device_ids: list[int] | None) -> nn.Module:
        """The wrapper itself. Override it to use your own; it is called with the model on its device."""
        return DistributedDataParallel(model, device_ids=device_ids, **self.keywords)

    def before_backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            search = model.find_unused_parameters and not model.static_graph
            model.reducer._rebuild_buckets()
            model.reducer.prepare_for_backward([loss] if search else [])

    def run_step(self, model: nn.Module, name: str, *args: Any) -> Any:
        # Only training goes through DDP: it broadcasts buffers, and a rank without a validation batch would be missing.
        if name == "training_step" or not isinstance(model, DistributedDataParallel):
            try:
                return model(name, *args)
            except RuntimeError as error:
                if "find_unused_parameters" not in str(error) or not self.averaged:
                    raise
                self._refuse_unused(str(error))
        output = model.module(name, *args)
        if self.manual:
            self.after_forward()  # the hook at the inner forward's end has run, and DDP's own will not
        return output

    def _refuse_unused(self, told: str) -> None:
        """torch's error names a keyword that nobody writes here, and the parameters by their numbers."""
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", told)
        names = (
            [list(self.averaged.values())[int(number)] for number in numbers[1].split()]
            if numbers
            else ["one"]
        )
        raise UserError(
            f"{self.name} waits for the gradients of all parameters that learn, and {_first(names)} got none in the last step: "
            f"freeze what the loss does not use, or give strategy='ddp_find_unused_parameters_true'.",
            already_reported=self.world.rank != 0,
        ) from None

    def no_sync(self, model: nn.Module) -> AbstractContextManager:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def learning(model: nn.Module) -> dict[nn.Parameter, str]:
    """The parameters that learn, with their names as the user knows them."""
    return {
        p: re.sub(r"^(module\.)+", "", name)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def _first(names: list[str]) -> str:
    return f"{names[0]!r}" + (f" (one of {len(names)})" if len(names) > 1 else "")


_groups: list[dist.ProcessGroup | None] = []  # held until the end: see launch.end_gloo
_wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _disconnect() -> None:
    """The end of this process: whatever DDP lives on lets go of the group, so that gloo's threads can end."""
    for wrapped in _wrapped:
        wrapped.reducer = wrapped.logger = wrapped.process_group = None
    if dist.is_initialized():
        dist.destroy_process_group()
    _groups.clear()
