"""Write texts to torch's structured trace: the folder in the environment variable TORCH_TRACE, which tlparse reads."""

from __future__ import annotations

from torch._logging._internal import trace_structured


def write_artifact(name: str, text: str) -> None:
    """Write a text as an artifact of the trace, which tlparse shows as a file of this name."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,  # no compile of torch is under way
    )
