"""Collectives and streams: what overlaps with computing, what waits, FSDP2's prefetching."""

import pytest
from virtual_ranks import run_ranks

pytestmark = pytest.mark.slow

START = """
from torch import nn
from multigpu import Link
from multigpu.virtual.sim import machine

slow = Link("slow", bandwidth=1e10, latency=1e-6)
(device,) = control.start(1, gpu="A100-80GB", link=slow, compute=False)
join()
everything = {}
"""

END = """
dist.barrier()
print(json.dumps(everything))
dist.destroy_process_group()
"""

COLLECTIVES = """
def last(kind="compute"):
    return [event for event in machine.current().clock.events() if event.kind == kind][-1]


x, y, z = (torch.zeros(10**7, device=device) for _ in range(3))
side, own = torch.vgpu.Stream(), torch.vgpu.current_stream()
control.elapsed()
with side:
    work = dist.all_reduce(x, async_op=True)
    other = dist.all_reduce(z, async_op=True)
    work.wait()
    host = machine.current().clock.now(0)
    x.add_(1)
    reader = last()
    done = side.record_event()
y.add_(1)
results["unrelated"] = last()
own.wait_event(done)
y.add_(1)
results["waiting"] = last()
other.wait()
y.add_(1)
results["after both"] = last()
first, second = [e for e in machine.current().clock.events() if e.kind == "collective"][-2:]
results.update(first=first, second=second, reader=reader, host=host, side=side.stream_id)
results["elapsed"] = control.elapsed()
"""

POLLING = """
x, y = (torch.zeros(10**7, device=device) for _ in range(2))
control.elapsed()
first = dist.all_reduce(x, async_op=True)
second = dist.all_reduce(y, async_op=True)
asked = 0
while not second.is_completed():
    asked += 1
host = machine.current().clock.now(0)
torch.zeros(9, device=device).add_(1)
events = machine.current().clock.events()
results.update(
    asked=asked,
    host=host,
    collectives=[e for e in events if e.kind == "collective"][-2:],
    next=[e for e in events if e.kind == "compute"][-1],
)
first.wait()
"""

FSDP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH = 4096
mesh = init_device_mesh("vgpu", (2,))


def step(one_stream):
    # FSDP2 takes its streams from the device's module.
    Stream = torch.vgpu.Stream
    if one_stream:
        torch.vgpu.Stream = lambda priority=0: torch.vgpu.default_stream()
    try:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(4)]
        model = nn.Sequential(*layers)
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        x = torch.zeros(8192, WIDTH, device=device)
        start = control.elapsed()
        model(x).square().mean().backward()
        return control.timeline(since=start)
    finally:
        torch.vgpu.Stream = Stream


for name in ("streams", "one stream"):
    timeline = step(one_stream=name == "one stream")
    results[name] = {
        "seconds": timeline.end - timeline.start,
        "overlap": timeline.overlap(0),
        "breakdown": timeline.breakdown(0),
        "events": timeline.events,
    }
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """The results of each part of the program, by its name, on both ranks."""
    parts = {"waits": COLLECTIVES, "polling": POLLING, "fsdp": FSDP}
    program = "".join(
        f"results = everything['{name}'] = {{}}\n{text}" for name, text in parts.items()
    )
    return run_ranks(START + program + END, 2, tmp_path_factory.mktemp("ranks"))


def of_kind(events: list, *names: str) -> list[tuple[float, float]]:
    """(start, end) of the events with these names; ranks return events as lists."""
    return [(start, end) for _, _, _, name, start, end, *_ in events if name in names]


def test_wait_moves_the_current_stream_and_not_the_host(ranks):
    for rank in (each["waits"] for each in ranks):
        _, kind, _, _, start, end, peer, stream, *_ = rank["first"]
        assert (kind, peer, stream) == ("collective", None, rank["side"])
        assert rank["host"] < end, "the host continues"
        assert rank["reader"][4] == end
        assert start < rank["unrelated"][4] < end, "the other stream does not wait"
        assert rank["waiting"][4] >= rank["reader"][5]
        assert rank["second"][4] == end, "one collective of a group after the other"
        assert rank["after both"][4] == rank["second"][5] < rank["elapsed"]


def test_a_program_can_ask_until_a_collective_is_done(ranks):
    """Each question takes the host's time, as with NCCL; the host goes on when it is done."""
    for rank in (each["polling"] for each in ranks):
        first, second = rank["collectives"]
        assert second[4] == first[5], "one collective of a group after the other"
        assert second[5] <= rank["host"] < second[5] + 1e-4
        assert rank["asked"] > 10
        assert rank["host"] <= rank["next"][4] < rank["host"] + 1e-4


def test_fsdp2_gathers_the_next_layer_while_this_one_computes(ranks):
    for rank in (each["fsdp"] for each in ranks):
        overlapping, serial = rank["streams"], rank["one stream"]
        events = overlapping["events"]
        forward = [event for event in events if event[2] == "forward"]
        backward = [event for event in events if event[2] == "backward"]
        gathers, products = of_kind(forward, "allgather"), of_kind(forward, "mm")
        assert len(gathers) == len(products) == 4
        for product, following in zip(products, gathers[1:], strict=False):
            assert following[0] < product[1], (
                "the next layer's weights arrive during this product"
            )
        products = of_kind(backward, "mm")
        scatters = of_kind(backward, "reduce_scatter")
        assert len(scatters) == 4
        for scatter in scatters[:-1]:
            assert any(begin < scatter[1] and scatter[0] < end for begin, end in products)
        # Without the streams the same work takes as much longer as is hidden with them.
        assert serial["overlap"] == 0
        hidden = overlapping["overlap"] * overlapping["seconds"]
        difference = serial["seconds"] - overlapping["seconds"]
        assert difference == pytest.approx(hidden, rel=0.05)
        assert difference > 0.1 * serial["seconds"]
        assert overlapping["breakdown"]["transfer"] < serial["breakdown"]["transfer"] / 2
