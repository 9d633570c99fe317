"""verify(): compare a pipeline with its model, and explain each difference."""
