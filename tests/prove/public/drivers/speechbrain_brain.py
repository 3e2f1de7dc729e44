"""SpeechBrain's own epoch, with gradients of three micro-batches: speechbrain.Brain.fit."""

import os
import sys

import tiny
import torch
from torch.utils.data import DataLoader

# The case reads no sound, and torchaudio needs the same build as torch.
tiny.absent("torchaudio")
sys.modules["torchaudio"].get_audio_backend = lambda: "soundfile"

import speechbrain  # noqa: E402

MICRO_BATCHES = 3


class Brain(speechbrain.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch)

    def compute_objectives(self, predictions, batch, stage):
        return (predictions - batch.sum(1, keepdim=True)).square().mean()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        print(f"loss {float(stage_loss):.4f}")


def main() -> None:
    tiny.start()
    brain = Brain(
        modules={"model": tiny.model(outputs=1)},
        hparams={},
        opt_class=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_opts={
            "distributed_launch": True,
            "distributed_backend": "gloo",
            "grad_accumulation_factor": MICRO_BATCHES,
            "noprogressbar": True,
        },
    )
    batches = [tiny.share(rows) for rows in tiny.batches(8, count=tiny.STEPS * MICRO_BATCHES)]
    brain.fit(range(1), DataLoader(batches, batch_size=None))
    tiny.end()


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", "0")
    main()
