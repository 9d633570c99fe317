"""Collect the differences that verify() finds over its steps, and how much of each difference is rounding.

Each outcome is of one step: `by_pipeline`, or of the unsplit model `by_pieces` on microbatches, `by_whole` on the whole
batch, and `by_shaken` on microbatches with rounded weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.api.verify.compare import Outcome, limit_difference, list_differences
from fxsplit.api.verify.trials import Key, Neutral, Trial
from fxsplit.ir.facts.capture.scope import Scope
from fxsplit.torch_internals.tensors.differences import Difference

SAME_ARITHMETIC = {torch.float64: 1e-9, torch.float32: 1e-3}
"""By dtype: how much two runs of the same operators may differ, if only the order of additions differs."""
COARSE_ARITHMETIC = 4e-3
"""The same limit for coarser dtypes: half of the rounding of bfloat16."""


class Tally:
    """Collects how much a pipeline and its model differ at most, by kind and name, and how much of that is rounding."""

    def __init__(self, trial: Trial, split: Pipeline, tolerance: float) -> None:
        self.coarse = 0.0
        self._is_measured = False
        self._trial = trial
        self._split = split
        self._tolerance = tolerance
        self._found: dict[Key, float] = {}
        self._rounding: dict[Key, float] = {}
        # Tensors that differ from a run of the same operators in one piece: rounding excuses none of them.
        self._broken: dict[Key, float] = {}
        # Tensors that microbatches change for a reason in the model.
        self._natural: dict[Key, float] = {}

    def begin_step(self, model: nn.Module) -> None:
        """Copy the unsplit model before a step, to find out later which differences have a reason in the model."""
        self._neutral = Neutral(self._trial, model, 1e3 * self._tolerance)

    def compare(
        self, by_pipeline: Outcome, by_pieces: Outcome, by_whole: Outcome, shake: Callable[[], tuple[Outcome, float]]
    ) -> None:
        """Note how much a step of the pipeline differs from the same step of the model.

        Most tensors are compared with the model on microbatches (`by_pieces`). A tensor that microbatches should not
        change, but do, is compared with the model on the whole batch (`by_whole`), which runs without fxsplit.
        shake: runs the step after the weights were rounded, and returns the outcome, and the rounding of the coarsest
            dtype in the model. After the first step it is called only if rounding may have to excuse a difference.
        """
        is_first = not self._is_measured
        if is_first or self.coarse:
            self._measure_rounding(*shake(), by_pieces)
        apart = self._neutral.find_apart(by_pieces, by_whole, self._rounding, self.coarse)
        wrong = {key for key, why in apart.items() if why == "wrong"}
        pieces, whole = self._compare(by_pipeline, by_pieces), self._compare(by_pipeline, by_whole)
        _keep_largest(self._found, {k: d for k, d in pieces.items() if k not in wrong})
        _keep_largest(self._found, {k: d for k, d in whole.items() if k in wrong})
        self._natural |= dict.fromkeys((key for key, why in apart.items() if why == "nature"), 1.0)
        exceeds = not all(value <= self._tolerance for value in self._found.values())
        # Ranks run the step together, even if one of them finds no difference in its own stages.
        if not (is_first or self.coarse) and self._trial.ranks.any(exceeds):
            self._measure_rounding(*shake(), by_pieces)
        self._find_broken(by_pipeline, by_pieces)

    def _measure_rounding(self, by_shaken: Outcome, coarse: float, by_pieces: Outcome) -> None:
        """Note how much rounding changes every tensor: compare the model with itself after its weights were rounded.

        by_shaken: the outcome with rounded weights. by_pieces: the model's own outcome on microbatches.
        coarse: the rounding of the coarsest dtype in the model.
        """
        self._is_measured = True
        self.coarse = max(self.coarse, *self._trial.ranks.merge({("rounding", "coarse"): coarse}).values())
        _keep_largest(
            self._rounding, {(d.kind, d.name): d for d in list_differences(by_shaken, by_pieces, self.coarse)}
        )

    def _compare(self, by_pipeline: Outcome, by_model: Outcome) -> dict[Key, Difference]:
        """Return the difference of every tensor that the pipeline has on this rank."""
        found = list_differences(by_pipeline, self._trial.ranks.keep_own(by_model, self._split), self.coarse)
        return {(d.kind, d.name): d for d in found}

    def _find_broken(self, by_pipeline: Outcome, by_pieces: Outcome) -> None:
        """Note the tensors that differ from the captured graph run in one piece, though rounding would excuse them.

        Rounding in a coarse dtype is as large as a gradient that is wrong by a hundredth. But the pipeline runs the
        same operators as its graph, so both round alike.
        """
        ranks = self._trial.ranks
        suspects = _list_apart(by_pipeline, ranks.keep_own(by_pieces, self._split))
        excused = {key for key in suspects if self._found.get(key, 0.0) <= self._limit(key)}
        # A graph for a fixed number of rows runs on no other number.
        if self._split.traced[Scope].rows_fixed and len(set(self._trial.batch.rows)) > 1:
            excused = set()
        if not ranks.any(bool(excused)):  # ranks run the graph together
            return
        by_graph = self._trial.run_graph(self._split, self._neutral.model)
        for key in excused & _list_apart(by_pipeline, by_graph):
            self._broken[key] = 1.0

    def _limit(self, key: Key) -> float:
        """Return the largest difference of a tensor that is excused."""
        return limit_difference(self._tolerance, self._rounding.get(key, 0.0), self.coarse)

    def list_differences(self) -> tuple[Difference, ...]:
        """Return the differences that all ranks have found, each with the part that is rounding."""
        merge = self._trial.ranks.merge
        found, rounding, broken = merge(self._found), merge(self._rounding), merge(self._broken)
        return tuple(
            Difference(*key, value, rounding.get(key, 0.0), broken=key in broken) for key, value in found.items()
        )

    def list_natural(self) -> tuple[str, ...]:
        """Return the names of values that microbatches change for a reason in the model, such as batch norm."""
        natural = self._trial.ranks.merge(self._natural)
        return tuple(f"output {name}" if kind == "output" else name for kind, name in natural)


def _keep_largest(found: dict[Key, float], more: Mapping[Key, Difference]) -> None:
    """Update `found` with the differences in `more`: the larger one stays for each tensor."""
    for key, difference in more.items():
        found[key] = max(found.get(key, 0.0), difference.value)


def _list_apart(found: Outcome, expected: Outcome) -> set[Key]:
    """Return the tensors that differ by more than another order of additions can explain."""
    apart = set()
    for d in list_differences(found, expected):
        tensors = {"output": found.outputs, "gradient": found.gradients, "buffer": found.buffers}[d.kind]
        tensor = tensors.get(d.name)
        dtype = torch.float64 if tensor is None else tensor.dtype
        real = dtype.to_real() if dtype.is_complex else dtype
        if not d.value <= SAME_ARITHMETIC.get(real, COARSE_ARITHMETIC):
            apart.add((d.kind, d.name))
    return apart
