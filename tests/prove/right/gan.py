"""A GAN on points of a circle: two networks in DDP, each with its own optimizer."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

torch.manual_seed(0)
generator = DDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).to(device))
critic = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1)).to(device)
discriminator = DDP(critic)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
angles = 6.2832 * torch.rand(4, 24)
noise = torch.randn(4, 24, 8)

for step in range(4):
    angle = angles[step].chunk(world)[rank].to(device)
    real = torch.stack([angle.cos(), angle.sin()], dim=1)
    z = noise[step].chunk(world)[rank].to(device)

    # The discriminator: real points are 1, generated points are 0.
    d_optimizer.zero_grad()
    fake = generator(z)
    scores = discriminator(torch.cat([real, fake.detach()]))
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    d_loss = F.binary_cross_entropy_with_logits(scores, torch.cat([ones, zeros]).to(device))
    d_loss.backward()
    d_optimizer.step()

    # The generator: its points should count as real.
    g_optimizer.zero_grad()
    scores = discriminator(fake)
    g_loss = F.binary_cross_entropy_with_logits(scores, ones.to(device))
    g_loss.backward()
    g_optimizer.step()
    if rank == 0:
        print(f"step {step}: d {d_loss.item():.4f} g {g_loss.item():.4f}")
dist.destroy_process_group()
