"""torch.distributed: process groups, and parameters, gradients and optimizers of which other ranks have a part."""
