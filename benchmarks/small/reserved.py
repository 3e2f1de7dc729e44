"""One product and its backward: print what the caching allocator has then reserved."""

import torch

a = torch.ones(512, 512, device="cuda", requires_grad=True)
(a @ a).sum().backward()
print("reserved", torch.cuda.memory_reserved())
