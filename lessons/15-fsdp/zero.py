"""ZeRO-1, 2 and 3 by hand, in the program of scripts/PT_GPT_FSDP.py.

    torchrun --standalone --nproc-per-node=2 lessons/15-fsdp/zero.py --stage 3
    multigpu prove torchrun --nproc-per-node=2 lessons/15-fsdp/zero.py --stage 3

--stage is 1, 2 or 3; the other options are the script's, without --group and --precision.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from multigpu.course import find_root

sys.path.insert(0, str(find_root() / "scripts"))

import PT_GPT_FSDP as script


class Zero1:
    """Each rank has AdamW's state for its part of each weight, and updates this part."""

    def __init__(self, model, lr, mesh):
        self.mesh, self.ranks = mesh, mesh.size()
        self.parts = {weight: nn.Parameter(self.own(weight)) for weight in model.parameters()}
        self.optimizer = torch.optim.AdamW(self.parts.values(), lr)
        self.zero_grad = self.optimizer.zero_grad

    def own(self, weight):  # a view: what AdamW changes in it changes the weight
        return self.named(weight.data.view(-1).chunk(self.ranks)[self.mesh.get_local_rank()])

    def named(self, part):  # a DTensor says of which whole it is a part
        return DTensor.from_local(part, self.mesh, [Shard(0)], run_check=False)

    def reduce(self, weight):
        mean = weight.new_empty(weight.numel() // self.ranks)
        dist.reduce_scatter(mean, [*weight.grad.div_(self.ranks).view(-1).chunk(self.ranks)])
        part, mean, weight.grad = self.parts[weight], self.named(mean), None
        part.grad = mean if part.grad is None else part.grad + mean

    def gather(self, weight):
        part = self.parts[weight].data.to_local()
        dist.all_gather([*weight.data.view(-1).chunk(self.ranks)], part)

    def step(self):
        for weight in self.parts:
            if weight.grad is not None:
                self.reduce(weight)
        self.optimizer.step()
        for weight in self.parts:
            self.gather(weight)


class Zero2(Zero1):
    """Gradients are shared, too: backward reduces each one as soon as it is there."""

    def __init__(self, model, lr, mesh):
        super().__init__(model, lr, mesh)
        for weight in self.parts:
            weight.register_post_accumulate_grad_hook(self.reduce)


class Zero3(Zero2):
    """Weights are shared, too: a block's are whole in its forward and its backward alone."""

    def __init__(self, model, lr, mesh):
        super().__init__(model, lr, mesh)
        others = nn.ModuleList([model.words, model.places, model.norm, model.head])
        model.register_forward_pre_hook(lambda *_: self.whole(others))
        for block in model.blocks:
            block.register_forward_pre_hook(self.whole)
            block.register_forward_hook(self.free)
            block.register_full_backward_pre_hook(self.whole)
        model.register_state_dict_pre_hook(self.whole)

    def whole(self, module, *_):
        for weight in module.parameters():
            weight.untyped_storage().resize_(weight.nbytes)
            self.gather(weight)

    def free(self, module, *_):
        for weight in module.parameters():
            weight.untyped_storage().resize_(0)

    def own(self, weight):  # a copy: the weight goes
        part = super().own(weight).clone()
        weight.untyped_storage().resize_(0)
        return part

    def reduce(self, weight):  # backward needed the weight until now
        super().reduce(weight)
        weight.untyped_storage().resize_(0)

    def step(self):
        self.optimizer.step()


STAGES = {"1": Zero1, "2": Zero2, "3": Zero3}


def main():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--stage", choices=STAGES, default="3")
    args, sys.argv[1:] = parser.parse_known_args()
    if any(word.startswith(("--g", "--p")) for word in sys.argv[1:]):
        parser.error("--group and --precision are fully_shard's: run scripts/PT_GPT_FSDP.py")
    script.main(STAGES[args.stage])


if __name__ == "__main__":
    main()
