"""Files of weights: safetensors, by themselves or in folders of checkpoints, their names, and JSON beside them."""
