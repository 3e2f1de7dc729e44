"""CLIP's loss: embeddings of all ranks are gathered by an operation that autograd knows."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, batch):
        image = F.normalize(self.image(batch["image"]), dim=1)
        text = F.normalize(self.text(batch["text"]), dim=1)
        return image, text, self.scale.exp()


use_cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if use_cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else "cpu"

torch.manual_seed(0)
model = DDP(Towers().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
images, texts = torch.randn(6, 12, 40), torch.randn(6, 12, 24)

for step in range(6):
    batch = {
        "image": images[step].chunk(world)[rank].to(device),
        "text": texts[step].chunk(world)[rank].to(device),
    }
    image, text, scale = model(batch)
    all_images = torch.cat(dist_nn.all_gather(image))
    all_texts = torch.cat(dist_nn.all_gather(text))
    # This rank's rows against the columns of all ranks.
    target = torch.arange(len(image), device=device) + rank * len(image)
    loss = F.cross_entropy(scale * image @ all_texts.T, target) / 2
    loss = loss + F.cross_entropy(scale * text @ all_images.T, target) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
