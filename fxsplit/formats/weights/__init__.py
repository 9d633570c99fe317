"""Read and write files of weights: safetensors in one or several files, checkpoint folders, names, and typed JSON."""
