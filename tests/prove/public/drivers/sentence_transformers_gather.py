"""In-batch negatives of all ranks: sentence_transformers' MultipleNegativesRankingLoss.

Each anchor has a positive and a hard negative. The model is a small one of our own: the loss
calls it once for each column, as it calls a SentenceTransformer.
"""

import tiny
import torch
from sentence_transformers.losses import MultipleNegativesRankingLoss
from torch import nn


class Embedder(nn.Module):
    """Answers as a SentenceTransformer does: with features in, features out."""

    def __init__(self):
        super().__init__()
        self.layers = tiny.model()

    def forward(self, features: dict) -> dict:
        return {**features, "sentence_embedding": self.layers(features["rows"])}


def main() -> None:
    tiny.start()
    model = tiny.parallel(Embedder())
    criterion = MultipleNegativesRankingLoss(model, gather_across_devices=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    columns = tiny.batches(16), tiny.batches(16, seed=2), tiny.batches(16, seed=3)
    for anchors, noise, negatives in zip(*columns, strict=True):
        optimizer.zero_grad()
        positives = anchors + 0.3 * noise
        rows = [{"rows": tiny.share(each)} for each in (anchors, positives, negatives)]
        loss = criterion(rows, labels=None)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}")
    tiny.end()


if __name__ == "__main__":
    main()
