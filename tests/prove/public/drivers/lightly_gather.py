"""SimCLR, with the embeddings of all ranks as negatives: lightly.loss.NTXentLoss."""

import tiny
import torch

tiny.absent("torchvision", "torchvision.ops")
tiny.without_init("lightly", "lightly.loss", "lightly.utils")
tiny.without_init("lightly.models", "lightly.models.modules")

from lightly.loss.ntx_ent_loss import NTXentLoss  # noqa: E402


def main() -> None:
    tiny.start()
    model = tiny.parallel(tiny.model())
    criterion = NTXentLoss(temperature=0.5, gather_distributed=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for rows, noise in zip(tiny.batches(32), tiny.batches(32, seed=2), strict=True):
        optimizer.zero_grad()
        one, other = tiny.share(rows), tiny.share(rows + 0.3 * noise)
        loss = criterion(*model(torch.cat([one, other])).chunk(2))
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}")
    tiny.end()


if __name__ == "__main__":
    main()
