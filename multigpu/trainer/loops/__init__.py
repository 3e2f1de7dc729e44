"""What the Trainer runs: a stage, its epochs, its batches; and their state."""
