"""Three clocks around ten training steps on a GPU: `python gpu_clocks.py 4096` (the batch).

Without a GPU: multigpu virtual --gpus 1 --clock simulated --shapes-only gpu_clocks.py 4096
"""

import sys
import time

import torch
import torch.nn.functional as F

from multigpu.models import CNN

STEPS = 10
batch = int(sys.argv[1])
model = CNN((1, 28, 28)).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
images = torch.rand(batch, 1, 28, 28, device="cuda")
labels = torch.zeros(batch, dtype=torch.long, device="cuda")


def train(steps: int) -> None:
    for _ in range(steps):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


train(3)  # warm-up
torch.cuda.synchronize()  # so that the measurement begins with an empty queue
start = torch.cuda.Event(enable_timing=True)
end = torch.cuda.Event(enable_timing=True)

began = time.perf_counter()
start.record()
train(STEPS)
end.record()
without_waiting = 1e3 * (time.perf_counter() - began)
torch.cuda.synchronize()
with_synchronize = 1e3 * (time.perf_counter() - began)
with_events = start.elapsed_time(end)  # ms; both events must be done, so after synchronize

print(f"batch of {batch:,}, ms per step:", end=" ")
print(f"without waiting {without_waiting / STEPS:.2f}", end=", ")
print(f"with synchronize {with_synchronize / STEPS:.2f}", end=", ")
print(f"with events {with_events / STEPS:.2f}")
