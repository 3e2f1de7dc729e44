"""LeJEPA's regularizer, with statistics over all ranks: lightly.loss.lejepa_loss.SIGReg."""

import tiny
import torch

tiny.without_init("lightly", "lightly.loss")

from lightly.loss.lejepa_loss import SIGReg  # noqa: E402


def main() -> None:
    tiny.start()
    model = tiny.parallel(tiny.model())
    regularizer = SIGReg(num_vectors=16, gather_distributed=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for rows in tiny.batches(32):
        optimizer.zero_grad()
        loss = regularizer(model(tiny.share(rows)))
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}")
    tiny.end()


if __name__ == "__main__":
    main()
