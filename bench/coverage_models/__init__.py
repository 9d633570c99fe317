"""Popular models, each as a factory of (model, args, kwargs)."""
