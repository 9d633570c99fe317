"""torch.nn and torch.optim: batch norms, recurrent layers, transformers, containers, copies, optimizer state."""
