"""Checkpoints in Lightning's format, and the hyperparameters in them."""
