"""Check that a captured graph is its model: what it returns (values, outputs) and its gradients (gradients)."""
