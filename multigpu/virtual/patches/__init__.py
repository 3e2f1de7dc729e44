"""All symbols of torch that are replaced while virtual GPUs run.

`control.start()` applies TABLE, and `control.stop()` undoes all of it. The device type and its
kernels are registered once and stay until the process ends: see backend.PERMANENT.
"""

import torch

from multigpu.virtual.ops import autocast
from multigpu.virtual.ops.tensor import VirtualTensor
from multigpu.virtual.patches import (
    comm,
    compiling,
    current_device,
    decisions,
    dlpack,
    engine,
    generators,
    lazy,
    loading,
    moving,
    nccl_group,
    pinned,
    scripting,
    sharing,
    streams,
    updates,
    used_parameters,
    world_group,
)
from multigpu.virtual.patches.replacing import Replacement, Setting, Table, rows, values
from multigpu.virtual.sim import names


def _backward_can_be_boxed() -> bool:
    return hasattr(torch.autograd.function.BackwardCFunction, "apply_boxed")


def _torch_has_no_gpu() -> bool:
    return not torch.cuda.is_available()


def _is_the_accelerator() -> bool:
    """Whether programs see the devices as "vgpu", and torch has no GPU of its own.

    virtual.face has own rows for CUDA.
    """
    return names.shown_type() == names.INNER and _torch_has_no_gpu()


_GRADIENT_CHECK = (
    "the engine does not check the device of gradients that are tensors of a subclass"
)
_COMPILER = "torch.compile would make code for a real device"
_LAZY = "the parameters of a lazy module have a class that a virtual tensor cannot have"

TABLE = Table(
    (
        # During a call, _apply also replaces torch.utils.swap_tensors and sets the flag of
        # torch.__future__ for swapped parameters.
        Replacement(
            "torch.nn.Module",
            "_apply",
            moving.moving_apply,
            "Module.to makes new parameters if the tensor's class changes: tied layers and "
            "optimizers would keep the old ones",
        ),
        Replacement(
            "torch.Tensor",
            "data",
            moving.data_property,
            "FSDP1 assigns a tensor of the device to the data of a parameter on the host; "
            "torch refuses another class",
        ),
        *rows(
            (
                "torch.nn.parameter.UninitializedParameter",
                "torch.nn.parameter.UninitializedBuffer",
            ),
            ["__new__"],
            lazy.made_on_host,
            _LAZY,
        ),
        Replacement(
            "torch.nn.parameter.UninitializedParameter",
            "__deepcopy__",
            lazy.copied_to_its_place,
            _LAZY,
        ),
        Replacement(
            "torch.nn.parameter.UninitializedTensorMixin",
            "device",
            lazy.place_property,
            _LAZY,
            optional=True,
        ),
        *values(
            ["torch.nn.parameter.UninitializedTensorMixin"],
            {"materialize": lazy.materialize},
            _LAZY,
        ),
        Replacement(
            "torch.autograd.Variable",
            "_execution_engine",
            engine.Engine,
            "backward runs in one thread, and raises the exceptions that the device guard "
            "has caught",
        ),
        Replacement(
            "torch.autograd.function.BackwardCFunction",
            "apply",
            engine.check_gradients,
            _GRADIENT_CHECK,
        ),
        Replacement(
            "torch.autograd.function.BackwardCFunction",
            "apply_boxed",
            engine.check_gradients,
            _GRADIENT_CHECK,
            when=_backward_can_be_boxed,
        ),
        *values(
            ["torch.Tensor"],
            {"pin_memory": pinned.pin_memory, "is_pinned": pinned.is_pinned},
            "torch's own method raises if there is no accelerator with pinned memory",
            when=_torch_has_no_gpu,
        ),
        *current_device.ROWS,
        *values(
            ["torch._C"],
            current_device.ACCELERATOR,
            "torch.accelerator asks the device guard, which knows one device with one stream",
            when=_is_the_accelerator,
        ),
        *rows(
            ["torch"],
            pinned.FACTORIES,
            pinned.pinning,
            "pin_memory=True asks the accelerator for an allocator, which a backend in "
            "Python cannot have",
            when=_torch_has_no_gpu,
        ),
        Replacement(
            "torch",
            "Generator",
            generators.generator_class,
            "torch asks a device type for its generators in C++ only",
        ),
        Replacement(
            "torch",
            "Stream",
            streams.stream_class,
            "torch asks the device guard for streams, and a guard of Python has one stream",
        ),
        Replacement(
            "torch",
            "Event",
            streams.event_class,
            "torch asks the device guard for events, and a guard of Python has none",
        ),
        *(
            Replacement(
                owner,
                function.__name__,
                comm.for_virtual_gpus(function),
                "DataParallel's copies: torch's own are written in C++, for CUDA and NCCL",
            )
            for owner in ("torch.nn.parallel.comm", "torch.cuda.comm")
            for function in comm.FUNCTIONS
        ),
        *values(
            ("torch._utils", "torch.nn.parallel.data_parallel"),
            {"_get_available_device_type": names.shown_type},
            "DataParallel asks CUDA first, and beside a real GPU its devices are virtual",
        ),
        Replacement(
            "torch.nn.parallel._functions",
            "_streams",
            comm.streams,
            "DataParallel makes a stream for each device and keeps it, also if the next "
            "virtual GPUs are more",
        ),
        Replacement(
            "torch.nn.init",
            "_no_grad_trunc_normal_",
            decisions.truncated_normal,
            "it repeats a draw until all numbers are inside the limits",
            when=decisions.tensors_have_shapes_only,
        ),
        *rows(
            ["math"],
            decisions.MATH,
            decisions.math_function,
            "an unknown number is a float, as which it is NaN",
            when=decisions.tensors_have_shapes_only,
        ),
        Replacement(
            "torch.fx.experimental.proxy_tensor",
            "HANDLED_TYPES",
            lambda original: (*original, VirtualTensor),
            "make_fx and torch.func.linearize do not record operations on other classes: "
            "their graph would have constants in the place of results",
        ),
        Replacement(
            "torch",
            "clear_autocast_cache",
            autocast.clearing,
            "torch keeps 16-bit copies of the weights of its own devices only",
        ),
        *rows(
            ("torch", "torch.utils.dlpack"),
            ["to_dlpack"],
            dlpack.refusing,
            "it asks no class, and would hand out an address of nothing",
        ),
        Replacement("torch", "compile", compiling.leave_out, _COMPILER),
        Replacement(
            "torch._dynamo.eval_frame",
            "_stance",
            compiling.run_eagerly,
            _COMPILER,
            when=compiling.compiler_is_loaded,
        ),
        *(
            Replacement("torch.jit", name, make, "C++ has another name of a virtual GPU")
            for name, make in (
                ("script", scripting.script),
                ("trace", scripting.trace),
                ("load", scripting.read),
                ("save", scripting.write),
            )
        ),
        Setting(
            "how torch.save and torch.load treat a storage's device",
            loading.register_location,
            "a virtual GPU has no storages",
        ),
        Replacement(
            "torch._weights_only_unpickler",
            "_get_user_allowed_globals",
            loading.reading_shapes,
            "torch.load refuses functions that it does not know",
        ),
        # A tensor that outlives control.stop() does not need this: it cannot be pickled.
        Setting(
            "how a tensor goes to another process",
            sharing.register_reduction,
            "another process would get a storage without its device",
        ),
        Setting(
            "the classes of parameters with foreach kernels",
            updates.register_foreach,
            "optimizers use their foreach implementation for parameters on a GPU, if the "
            "parameters' class is in this list",
        ),
        Replacement(
            "torch.autograd.profiler",
            "record_function",
            updates.mark_optimizer_steps,
            "the clock needs to know when an optimizer's step begins and ends; torch does not "
            "call its hooks for steps if a step raises",
        ),
        # A process group that outlives control.stop() can still be used and destroyed, because
        # torch looks up these entries only when it makes a group.
        Setting(
            'the backend "vgpu"',
            nccl_group.register,
            "dist.init_process_group finds it in the registries of torch.distributed.Backend",
        ),
        Setting(
            'the backend "vgpu_world"',
            world_group.register,
            "dist.init_process_group finds it in the registries of torch.distributed.Backend",
        ),
        *rows(
            ("torch.distributed", "torch.distributed.distributed_c10d"),
            ["batch_isend_irecv"],
            nccl_group.batch_in_one_kernel,
            "torch starts the messages of a batch one by one in a process group in Python",
        ),
        *rows(
            ["torch.distributed.Reducer"],
            ("__init__", "_set_static_graph"),
            used_parameters.with_map_on_host,
            "DDP counts unused parameters by way of pinned memory, for which a backend in "
            "Python has no allocator",
        ),
        # A DDP model that outlives control.stop() still has no timer: torch warns once.
        *values(
            ["torch.distributed.Logger"],
            {"set_runtime_stats_and_log": lambda logger: None},
            "DDP times its steps for its own log; it has no timer for a virtual GPU, so it "
            "would warn on every rank",
        ),
    )
)
