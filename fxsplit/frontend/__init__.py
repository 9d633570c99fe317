"""Capture: an nn.Module and an example become the IR that the passes start from."""

from fxsplit.torch_internals import needs  # noqa: F401  # says what torch lacks, before any file asks torch for it
