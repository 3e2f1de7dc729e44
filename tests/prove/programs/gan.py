"""A GAN: two models with DDP, two optimizers, and noise that all ranks draw alike."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, STEPS = 32, 6

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

random = torch.Generator().manual_seed(0)
data = torch.randn(STEPS, BATCH, 8, generator=random) @ torch.randn(8, 8, generator=random)

torch.manual_seed(0)
generator = DDP(nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 8)))
critic = DDP(nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.999))

for step in range(STEPS):
    real = data[step, rank::world]
    noise = torch.randn(BATCH, 4, generator=random)[rank::world]
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

    fake = generator(noise)
    scores = critic(torch.cat([real, fake.detach()]))
    critic_loss = bce(scores, torch.cat([ones, zeros]))
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()

    generator_loss = bce(critic(fake), ones)
    generator_optimizer.zero_grad()
    generator_loss.backward()
    generator_optimizer.step()

dist.destroy_process_group()
