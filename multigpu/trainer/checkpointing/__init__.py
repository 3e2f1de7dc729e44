"""Lightning's checkpoint form: write it, read it, build a module from its hyperparameters."""
