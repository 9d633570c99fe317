"""One stage on one device: its forward and backward on a microbatch, recomputation, replicas, weight versions."""
