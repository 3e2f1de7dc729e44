"""torch.cuda's streams and events are those of the virtual GPUs (patches/streams.py)."""

import torch

from multigpu.virtual.patches import streams
from multigpu.virtual.patches.replacing import Row, values

_WHY = "torch's own streams are those of CUDA's driver"
_CLASSES = {"Stream": streams.Stream, "Event": streams.Event}
_FUNCTIONS = {
    "StreamContext": streams.StreamContext,
    "stream": streams.StreamContext,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "set_stream": streams.set_stream,
}


def _ids(stream: torch.Stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    streams.set_stream(streams.Stream(stream_id=stream_id, device_index=device_index))


# The functions of torch._C, which torch's compilers import by their names.
_DRIVER = {
    "_cuda_getCurrentStream": lambda index: _ids(streams.current_stream(index)),
    "_cuda_getDefaultStream": lambda index: _ids(streams.default_stream(index)),
    "_cuda_getCurrentRawStream": lambda index: streams.current_stream(index).stream_id,
    "_cuda_setStream": _set_stream,
}
ROWS: tuple[Row, ...] = (
    *values(("torch.cuda", "torch.cuda.streams"), _CLASSES, _WHY),
    *values(["torch.cuda"], _FUNCTIONS, _WHY),
    *values(["torch._C"], _DRIVER, _WHY),
)
