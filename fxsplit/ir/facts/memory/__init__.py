"""Memory: what a stage holds for one microbatch, for several at once, and permanently."""
