"""torch.export as a front end."""
