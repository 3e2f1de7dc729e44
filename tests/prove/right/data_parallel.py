"""nn.DataParallel: one process, each batch is split over the GPUs that it sees."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images = torch.randn(144, 1, 12, 12)
labels = torch.randint(10, (144,))
order = torch.Generator().manual_seed(1)
loader = DataLoader(
    TensorDataset(images, labels), batch_size=24, shuffle=True, generator=order
)

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.GroupNorm(2, 8),
    nn.ReLU(),
    nn.MaxPool2d(3),
    nn.Flatten(),
    nn.Linear(8 * 4 * 4, 10),
)
model = nn.DataParallel(model.to("cuda"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for step, (x, y) in enumerate(loader):
    x, y = x.to("cuda"), y.to("cuda")
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}, {torch.cuda.device_count()} GPUs")
