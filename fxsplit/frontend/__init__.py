"""The front end: make the first IR from an nn.Module and example inputs."""

from fxsplit.torch_internals import needs  # noqa: F401  # says what torch lacks, before any file asks torch for it
