"""Save and load training checkpoints: weights, optimizers and gradient hooks, over any number of devices."""
