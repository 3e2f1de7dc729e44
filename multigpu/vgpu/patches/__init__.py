"""What is replaced in torch while virtual GPUs run, and put back when they stop."""
