"""Errors: an error of a stage keeps its type, its fields and its text."""

from __future__ import annotations

import pytest
import torch

from fxsplit.errors import FxsplitError, MissingFact, NoFit, StageError, locate_stage_error


def test_an_error_of_a_stage_is_of_its_own_type_too() -> None:
    original = OSError(2, "no such file", "weights")
    original.note = "mine"  # type: ignore[attr-defined]
    error = locate_stage_error(original, "stage 1")
    assert isinstance(error, StageError) and isinstance(error, OSError) and isinstance(error, FxsplitError)
    assert (error.errno, error.strerror, error.filename) == (2, "no such file", "weights")
    assert vars(error)["note"] == "mine" and error.__cause__ is original
    assert str(error) == f"{original} (stage 1)" and error.where == "stage 1"


def test_types_that_cannot_be_made_are_wrapped() -> None:
    class Picky(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__("picked")

        def __init_subclass__(cls) -> None:
            raise TypeError("no subclasses")

    error = locate_stage_error(Picky(1, 2), "stage 0")
    assert type(error) is StageError and str(error) == "picked (stage 0)"


def test_texts_and_fields() -> None:
    assert str(MissingFact("no Costs yet")) == "no Costs yet", "KeyError would quote it"
    assert NoFit("short", 5.0).short_bytes == 5.0 and NoFit("short").short_bytes == float("inf")
    with pytest.raises(ValueError, match="x"):
        raise locate_stage_error(ValueError("x"), "here")


@pytest.mark.parametrize(
    "original",
    [
        torch.AcceleratorError("the launch failed"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("other words of torch's: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
)
def test_an_error_that_comes_late_says_so(original: Exception) -> None:
    """The node that the message named was the one that ran when the GPU reported an earlier one's failure."""
    error = locate_stage_error(original, "in stage 1 of 2, node 'relu'")
    assert isinstance(error, type(original)) and isinstance(error, StageError)
    assert "(in stage 1 of 2, node 'relu'; a GPU reports errors late" in str(error)
    assert "an earlier node or stage: run with CUDA_LAUNCH_BLOCKING=1" in str(error)


@pytest.mark.parametrize(
    "original", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("shapes"), ValueError("CUDA error: no")]
)
def test_an_error_that_comes_at_once_blames_its_own_node(original: Exception) -> None:
    assert locate_stage_error(original, "here").where == "here"
