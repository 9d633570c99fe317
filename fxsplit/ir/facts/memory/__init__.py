"""Memory: what a stage holds of one microbatch, of several at once, and always."""
