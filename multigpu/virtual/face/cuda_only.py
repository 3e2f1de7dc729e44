"""What needs a real GPU: packages and extensions with kernels of their own.

A package that cannot run (packages.py) raises ImportError. The device part of torch's
profiler is left out, which is said once.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

from multigpu.errors import UserError
from multigpu.virtual import left_out, packages
from multigpu.virtual.face.late import when_imported
from multigpu.virtual.patches.replacing import Replacement, Row, Setting, Table

EXTENSIONS = "torch.utils.cpp_extension"
PROFILER = (
    "torch.profiler measures the host alone: the times of virtual GPUs are simulated, and in "
    "the timeline of the run."
)


# ---- extensions in CUDA --------------------------------------------------------------------


def _refuse_extension(name: str) -> NoReturn:
    raise UserError(
        f"the extension {name!r} cannot be built, because a virtual GPU does not run code in "
        f"CUDA: use PyTorch's own operations, or an extension in C++ for the CPU."
    )


def _cuda_extension(original: Callable) -> Callable:
    def CUDAExtension(name: str, sources: Any, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_extension(name)

    return CUDAExtension


def _load(original: Callable) -> Callable:
    def load(name: str, sources: Any, *args: Any, **kwargs: Any) -> Any:
        files = [sources] if isinstance(sources, str) else sources
        has_cuda = any(str(file).endswith((".cu", ".cuh")) for file in files)
        if kwargs.get("with_cuda") or has_cuda:
            _refuse_extension(name)
        return original(name, sources, *args, **kwargs)

    return load


def _load_inline(original: Callable) -> Callable:
    def load_inline(
        name: str, cpp_sources: Any, cuda_sources: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("with_cuda") or cuda_sources:
            _refuse_extension(name)
        return original(name, cpp_sources, cuda_sources, *args, **kwargs)

    return load_inline


_BUILD = "nvcc would compile for a real GPU"
_EXTENSIONS = Table(
    (
        Replacement(EXTENSIONS, "CUDAExtension", _cuda_extension, _BUILD),
        Replacement(EXTENSIONS, "load", _load, _BUILD),
        Replacement(EXTENSIONS, "load_inline", _load_inline, _BUILD),
    )
)


def _watch_packages() -> Callable[[], None]:
    """Watch the imports of packages."""
    left_out.notes.clear()
    finder = packages.Finder()
    sys.meta_path.insert(0, finder)

    def restore() -> None:
        # Python's end has no list any more.
        if finder in (sys.meta_path or ()):
            sys.meta_path.remove(finder)

    return restore


# ---- what is left out ----------------------------------------------------------------------


def _profile(original: Callable) -> Callable:
    def __init__(self: Any, enabled: bool = True, **options: Any) -> None:
        if options.get("use_device") == "cuda" or options.get("use_cuda"):
            left_out.say_once(PROFILER)
            # With ProfilerActivity.CUDA alone, torch would have nothing to measure.
            options = {**options, "use_device": None, "use_cuda": False, "use_cpu": True}
        original(self, enabled, **options)

    return __init__


def _export_memory_timeline(original: Callable) -> Callable:
    @wraps(original)
    def export_memory_timeline(self: Any, path: str, device: str | None = None) -> None:
        # torch's default is the GPU, if there is one.
        if not str(device).startswith("cpu"):
            raise UserError(
                "torch.profiler measures the host alone, so it has no memory timeline of a "
                "virtual GPU: pass device='cpu', or read torch.cuda.max_memory_allocated()."
            )
        original(self, path, device)

    return export_memory_timeline


class _AllocatorState:
    """The state of CUDA's memory that a CUDA graph keeps, of which there are none."""


ROWS: tuple[Row, ...] = (
    # torch.compiler.reset() imports the module that has these two names.
    *(
        Replacement(
            "torch._C",
            name,
            lambda original, value=value: original or value,
            "torch imports them if there is CUDA; a CPU build has none",
            optional=True,
        )
        for name, value in (
            ("_cuda_CUDAAllocator_AllocatorState", _AllocatorState),
            ("_set_cached_tensors_enabled", lambda enabled: None),
        )
    ),
    Setting(
        "the imports of packages with CUDA kernels",
        _watch_packages,
        "their kernels cannot run, and their own errors do not say why",
    ),
    Setting(
        "extensions with CUDA kernels",
        when_imported(EXTENSIONS, _EXTENSIONS),
        "their kernels cannot run, and their own errors do not say why",
    ),
    Replacement("torch.autograd.profiler.profile", "__init__", _profile, PROFILER),
    Replacement(
        "torch.profiler.profile", "export_memory_timeline", _export_memory_timeline, PROFILER
    ),
)
