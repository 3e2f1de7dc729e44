"""What the Trainer runs: a stage from its first to its last line, its epochs, its batches; and their state."""
