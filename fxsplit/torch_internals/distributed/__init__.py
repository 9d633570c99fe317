"""torch.distributed: process groups, and parameters, gradients and optimizers that are spread over ranks."""
