"""CUDA programs, unchanged, on virtual GPUs: what `multigpu virtual` runs."""
