"""torch.fx: run and observe graphs, find what their nodes read, and keep values between calls."""
