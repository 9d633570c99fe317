"""Estimate times for a device that is not here: from the FLOPs and bytes of each operator, on the meta device."""
