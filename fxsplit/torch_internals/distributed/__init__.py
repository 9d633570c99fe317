"""torch.distributed: process groups, and parameters, gradients and optimizers spread over ranks."""
