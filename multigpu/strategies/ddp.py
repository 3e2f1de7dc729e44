"""ddp: one process per device, each with a full copy of the model.

torch's DistributedDataParallel averages the gradients during backward. Lesson 05 uses it
without a strategy.
"""

import atexit
import re
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from multigpu import devices
from multigpu.errors import UserError, pluralize
from multigpu.launch import relaunch, rendezvous
from multigpu.launch.world import World, find_world
from multigpu.strategies.accelerators import resolve
from multigpu.strategies.base import Strategy

Result = TypeVar("Result")

# The launchers' flags for the number of ranks per node and for the number of nodes.
RANKS_FLAG = {"torchrun": "--nproc-per-node={}", "srun": "#SBATCH --ntasks-per-node={}"}
NODES_FLAG = {"torchrun": "--nnodes={}", "srun": "#SBATCH --nodes={}"}


class GroupLifetime:
    """Keeps the process group alive until the process ends, then releases it in a safe order.

    Without this reference, a DDP wrapper could have the last reference to a gloo group. The
    group's destructor would then hold the GIL and wait for threads that need the GIL (see
    end_gloo in launch/exit.py).

    started    True if the strategy started the group; `end` then destroys the group
    wrappers   the DDP modules that use the group
    """

    def __init__(self, started: bool):
        self.started = started
        self.group = dist.group.WORLD
        self.wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        atexit.register(self.end)

    def end(self) -> None:
        """Release the group. The wrappers' references go first, so gloo's threads can end."""
        for wrapper in self.wrappers:
            wrapper.reducer = None
            wrapper.logger = None
            wrapper.process_group = None
        if self.started and dist.is_initialized():
            dist.destroy_process_group()
        self.group = None


class DDPStrategy(Strategy):
    """DistributedDataParallel, with ranks that torchrun, srun, mpirun or horovodrun starts.

    Without a launcher the strategy starts the script again, once per additional rank.

    process_group_backend   "nccl", "gloo", …; None: chosen for the hardware
    timeout                 how long a collective waits for a rank
    ddp_comm_hook, ddp_comm_state   arguments of DistributedDataParallel.register_comm_hook
    **keywords              arguments of DistributedDataParallel: find_unused_parameters,
                            static_graph, bucket_cap_mb, …
    """

    name = "ddp"
    uses_several_nodes = True
    processes_per_node: int | None = None  # None: one per device

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        ddp_comm_hook: Callable[..., torch.futures.Future[torch.Tensor]] | None = None,
        ddp_comm_state: object = None,
        **keywords: Any,
    ):
        super().__init__()
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self.ddp_comm_hook = ddp_comm_hook
        self.ddp_comm_state = ddp_comm_state
        self.keywords = keywords
        self.connected = False
        self.lifetime: GroupLifetime | None = None
        self._control: dist.ProcessGroup | None = None
        self.after_forward: Callable[[], None] | None = None
        self.forward_hooks: list[RemovableHandle] = []
        # The parameters whose gradients are averaged, with their names.
        self.averaged: dict[nn.Parameter, str] = {}

    # ---- the processes --------------------------------------------------------------------

    def ranks_on_node(self) -> int | None:
        """The requested number of ranks per node; None if the launcher decides."""
        return self.processes_per_node or (
            self.accelerator.count if self.accelerator else None
        )

    def launch(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run `function(*args)` in the ranks that a launcher started, or in new ranks."""
        wanted = self.ranks_on_node() or 1
        if self.find_world().launcher == "python" and wanted * self.num_nodes > 1:
            self.start(wanted)
        return function(*args)

    def find_world(self) -> World:
        """Return this process's rank and the number of ranks.

        Raises UserError if Slurm has allocated another number of GPUs on this node than its
        processes together need.
        """
        gpus_each = 1
        if self.processes_per_node and self.accelerator:
            gpus_each = self.accelerator.count or 1
        return find_world(gpus_each=gpus_each)

    @property
    def nodes(self) -> int:
        """The requested number of nodes, or the number that the launcher has started."""
        world = self.world if self.connected else self.find_world()
        return max(self.num_nodes, world.nodes)

    def start(self, processes: int) -> None:
        """Become rank 0, and start the script again for the other ranks of this machine.

        Raises UserError for several nodes, which need a launcher.
        """
        if self.num_nodes > 1:
            raise UserError(
                f"num_nodes={self.num_nodes}, and no launcher has started ranks on other "
                f"nodes: start the script on each node with "
                f"`torchrun --nnodes={self.num_nodes} --nproc-per-node={processes} …`, "
                f"or with srun in a Slurm job."
            )
        relaunch.relaunch_script(processes)

    def connect(self) -> None:
        """Find this process's rank and device, and start the process group if none runs."""
        if self.connected and dist.is_initialized():
            return
        self.accelerator = self.accelerator or resolve()
        self.world = self.find_world()
        self._check_launcher(self.world)
        self.device = self.accelerator.of_rank(self.world)
        self.devices = [self.device]
        started = not dist.is_initialized()
        if started:
            self.init_dist_connection()
        self.lifetime = GroupLifetime(started)
        if dist.get_backend() == "nccl":
            self._control = dist.new_group(backend="gloo", timeout=self.timeout)
        self.connected = True
        Strategy.has_been_rank = Strategy.has_been_rank or self.world.size > 1

    def init_dist_connection(self) -> None:
        """Start the process group; `self.world` and `self.device` are known already.

        Override it to start the group in another way.
        """
        dist.init_process_group(
            self.process_group_backend or devices.backend(self.device),
            store=rendezvous.open_store(self.world, self.device),
            rank=self.world.rank,
            world_size=self.world.size,
            timeout=self.timeout,
        )

    def _check_launcher(self, world: World) -> None:
        """Compare the Trainer's arguments with what the launcher started.

        Raises UserError if they differ, because ranks would wait for others that never start.
        """
        already_reported = world.rank != 0
        wanted = self.ranks_on_node()
        if wanted is not None and wanted != world.local_size:
            template = RANKS_FLAG.get(world.launcher)
            # mpirun and horovodrun expect the number of ranks on all nodes together.
            flag = template.format(wanted) if template else f"-np {wanted * world.nodes}"
            if self.processes_per_node:
                expected = f"{pluralize(wanted, 'rank')} per node"
                alternative = ""
            else:
                expected = pluralize(wanted, "device")
                alternative = f", or devices={world.local_size}"
            raise UserError(
                f"strategy {self.name!r} wants {expected}, but {world.launcher} started "
                f"{pluralize(world.local_size, 'rank')} on this node: "
                f"write '{flag}'{alternative}.",
                already_reported,
            )
        if self.num_nodes > 1 and self.num_nodes != world.nodes:
            hosts = [f"NODE{node}:{world.local_size}" for node in range(1, self.num_nodes + 1)]
            mpi_flags = f"-np {world.local_size * self.num_nodes} -H {','.join(hosts)}"
            flag = NODES_FLAG.get(world.launcher, mpi_flags).format(self.num_nodes)
            raise UserError(
                f"num_nodes={self.num_nodes}, but {world.launcher} started ranks on "
                f"{pluralize(world.nodes, 'node')}: "
                f"write '{flag}', or num_nodes={world.nodes}.",
                already_reported,
            )

    @property
    def control(self) -> dist.ProcessGroup | None:
        """The gloo group if NCCL runs, otherwise the default group; None with one rank."""
        if self.world.size == 1 or not self.connected:
            return None
        return self._control or dist.group.WORLD

    # ---- the model ------------------------------------------------------------------------

    def wrap(self, model: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        """The model in DistributedDataParallel."""
        return self.distributed(model)

    def distributed(self, model: nn.Module) -> nn.Module:
        """The model in DistributedDataParallel; unchanged if no parameter is trainable."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        wrapped = self.configure_ddp(model, device_ids)
        if self.ddp_comm_hook is not None:
            wrapped.register_comm_hook(self.ddp_comm_state, self.ddp_comm_hook)
        if isinstance(wrapped, DistributedDataParallel):
            if self.lifetime is not None:
                self.lifetime.wrappers.add(wrapped)
            self.averaged = trainable_parameters(model)
            if self.manual_optimization:
                self._allow_backward_within_forward(wrapped)
        return wrapped

    def start_epoch(self, model: nn.Module) -> None:
        """Raises UserError if the set of trainable parameters has changed since `wrap`.

        DDP averages the gradients of the parameters that were trainable then, and waits for
        all of these gradients.
        """
        wrapped = isinstance(model, DistributedDataParallel)
        if not self.averaged or self.world.size == 1:
            return
        if wrapped and not model.require_backward_grad_sync:
            return
        now = trainable_parameters(model)
        thawed = [name for parameter, name in now.items() if parameter not in self.averaged]
        frozen = [name for parameter, name in self.averaged.items() if parameter not in now]
        already_reported = self.world.rank != 0
        if thawed:
            hint = ""
            if wrapped:
                hint = ", or with find_unused_parameters=True freeze it in on_train_start"
            raise UserError(
                f"{self.name} averages the gradients of the parameters that were trainable "
                f"when fit began, but {_first(thawed)} became trainable later, so each rank "
                f"would train it alone: make it trainable from the start, with learning rate "
                f"0 until it is to be trained{hint}; or call fit again.",
                already_reported,
            )
        if frozen and wrapped and not (model.find_unused_parameters or model.static_graph):
            raise UserError(
                f"{self.name} waits for the gradients of the parameters that were trainable "
                f"when fit began, but {_first(frozen)} was frozen later: "
                f"give DDPStrategy(find_unused_parameters=True), "
                f"set its learning rate to 0 instead, or call fit again.",
                already_reported,
            )

    def _allow_backward_within_forward(self, wrapped: DistributedDataParallel) -> None:
        """Let a manual training step call `backward` inside DDP's forward.

        DDP prepares for the gradients at the end of its forward, which is too late if
        `backward` has run inside it. The hooks stop DDP from preparing there, and
        `before_backward` prepares DDP instead.
        """
        saved: list[bool] = []

        def pause(*_: object) -> None:
            saved.append(wrapped.require_backward_grad_sync)
            wrapped.require_backward_grad_sync = False

        def resume(*_: object) -> None:
            synchronized = saved.pop()
            wrapped.require_backward_grad_sync = synchronized
            wrapped.require_forward_param_sync = synchronized

        self.forward_hooks = [
            wrapped.module.register_forward_hook(pause),
            wrapped.register_forward_hook(resume),
        ]
        self.after_forward = resume

    def detach(self) -> None:
        """Remove the hooks, and drop the references to the wrapper and the model."""
        for hook in self.forward_hooks:
            hook.remove()
        self.forward_hooks = []
        self.after_forward = None
        self.averaged = {}

    def configure_ddp(self, model: nn.Module, device_ids: list[int] | None) -> nn.Module:
        """Make the wrapper. The model is on its device. Override it to use another wrapper."""
        return DistributedDataParallel(model, device_ids=device_ids, **self.keywords)

    def before_backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        """Prepare DDP for the gradients of `loss`.

        In automatic optimization, DDP's forward does this.
        """
        if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            search = model.find_unused_parameters and not model.static_graph
            model.reducer._rebuild_buckets()
            model.reducer.prepare_for_backward([loss] if search else [])

    def step_function(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """A function that runs a training step through DDP, and any other step without it.

        DDP's forward broadcasts buffers, so in validation the ranks would wait for a rank that
        has no batch.
        """

        def through_ddp(*args: Any) -> Any:
            try:
                return model(name, *args)
            except RuntimeError as error:
                if "find_unused_parameters" not in str(error) or not self.averaged:
                    raise
                self._raise_unused(str(error))

        def without_ddp(*args: Any) -> Any:
            output = model.module(name, *args)
            if self.manual_optimization:
                # The inner module's forward hook has run. DDP's own hook, which undoes it,
                # does not run.
                self.after_forward()
            return output

        wrapped = isinstance(model, DistributedDataParallel)
        return without_ddp if wrapped and name != "training_step" else through_ddp

    def _raise_unused(self, message: str) -> NoReturn:
        """Raise a UserError with the parameters' names, instead of torch's error.

        torch's error has only the parameters' numbers, and suggests an argument of DDP.
        """
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        which = "at least one"
        if numbers:
            averaged = list(self.averaged.values())
            which = _first([averaged[int(number)] for number in numbers[1].split()])
        raise UserError(
            f"{self.name} waits for a gradient of every trainable parameter, but {which} "
            f"got none in the last step: freeze the parameters that the loss does not use, "
            f"or give strategy='ddp_find_unused_parameters_true'.",
            already_reported=self.world.rank != 0,
        ) from None

    def no_sync(self, model: nn.Module) -> AbstractContextManager:
        """DDP's own no_sync, if the model is in DDP."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def trainable_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """The parameters that require gradients, with their names in the user's module."""
    return {
        parameter: re.sub(r"^(module\.)+", "", name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _first(names: list[str]) -> str:
    return f"{names[0]!r}" + (f" (one of {len(names)})" if len(names) > 1 else "")
