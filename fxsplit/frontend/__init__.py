"""The front end: make the first IR from an nn.Module and example inputs."""
