"""Compares torch's symbols before virtual GPUs look like CUDA, meanwhile and afterwards.

As a script it prints, as JSON, which symbols differ from before (torch_symbols.py)
"first"   after the first start and stop of virtual GPUs in the process
"during"  while virtual GPUs look like CUDA for the second time
"after"   after a training on them, and the second take_off
"""

import json
import sys
import time
import timeit

from torch_symbols import differences, snapshot, train


def main() -> None:
    import torch
    import torch.cuda.comm
    import torch.distributed.tensor
    import torch.utils.backend_registration
    import torch.utils.checkpoint

    from multigpu.virtual import control, face
    from multigpu.virtual.options import Options

    train([torch.device("cpu")], "gloo")  # for what torch itself sets up at first use
    others = [time.time, time.perf_counter, timeit.default_timer, *sys.meta_path]
    fresh = snapshot()
    control.start(2)
    control.stop()
    first = differences(fresh, snapshot())
    simulated = Options(clock="simulated")
    face.put_on(simulated)
    face.take_off()
    registered = snapshot()
    devices = face.put_on(simulated)
    during = snapshot()
    train(devices, "nccl")
    face.take_off()
    found = {
        "first": first,
        "during": differences(registered, during),
        "after": differences(registered, snapshot()),
        "others": others
        == [time.time, time.perf_counter, timeit.default_timer, *sys.meta_path],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
