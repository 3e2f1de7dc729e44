"""The Trainer's loops over stages, epochs and batches, and the state of a run."""
