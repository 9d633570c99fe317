"""torch.compile: unwrapping compiled code, compiling stages, and keeping functions out of compilation."""
