"""Models people have, each as a factory of (model, args, kwargs)."""
