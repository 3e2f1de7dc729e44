"""The small library under the course on training with many GPUs."""

__version__ = "0.1.0"
