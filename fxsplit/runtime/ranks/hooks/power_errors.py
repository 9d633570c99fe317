"""Give access to PowerSGD's compression errors by parameter. torch keeps them by bucket number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit.runtime.ranks.hooks.buckets import Bucket

Numbers = Mapping[Any, tuple[int, Sequence[Tensor]]]
"""For each bucket so far, by a key of its parameters: the bucket's number and its parameters."""


class PowerErrors:
    """The compression errors in a PowerSGDState. PowerSGD adds them to the next step's gradients.

    numbers: the number and parameters of each bucket. The caller adds new buckets.
    """

    def __init__(self, state: Any, numbers: Numbers) -> None:
        self._state = state
        self._errors: dict[int, Tensor] = state.error_dict
        self._numbers = numbers
        # The state before the running step: a failed step must leave no trace, and all ranks must count the same steps.
        self._before: tuple[int, list[dict[Any, Any]], Any] | None = None
        # Errors of parameters whose bucket has not come yet, with the parameter, as ids of freed objects are reused.
        self._ahead: dict[int, tuple[Tensor, Tensor]] = {}

    def _find(self, parameter: Tensor) -> Tensor | None:
        """Return the error of a parameter's gradients, or None if there is none so far."""
        if id(parameter) in self._ahead:
            return self._ahead[id(parameter)][1]
        for number, parameters in self._numbers.values():
            whole = self._errors.get(number)
            if whole is not None:
                for own, part in zip(parameters, torch.split(whole, [p.numel() for p in parameters]), strict=True):
                    if own is parameter:
                        return part
        return None

    def get(self, parameter: Tensor) -> Tensor:
        """Return the error of a parameter's gradients, in the parameter's shape."""
        found = self._find(parameter)
        return torch.zeros_like(parameter) if found is None else found.view_as(parameter)

    def has(self, parameter: Tensor) -> bool:
        """Return whether a parameter has an error so far."""
        return self._find(parameter) is not None

    def put(self, parameter: Tensor, left: Tensor) -> None:
        """Set the error of a parameter's gradients. Call `clear` first."""
        self._ahead[id(parameter)] = parameter, left.reshape(-1)

    def clear(self) -> None:
        """Forget all compression errors."""
        self._errors.clear()
        self._ahead.clear()

    @property
    def _kept(self) -> list[dict[Any, Any]]:
        """All state by bucket number. The last dictionary has the low-rank matrices that the next step starts from."""
        return [self._errors, self._ahead, self._state.p_memory_dict, self._state.q_memory_dict]

    def begin(self) -> None:
        """Note the state before a step, so that a failed step can be undone. A second call in one step does nothing."""
        if self._before is not None:
            return
        *replaced, written = self._kept
        then = [*map(dict, replaced), {number: matrices.clone() for number, matrices in written.items()}]
        self._before = self._state.iter, then, self._state.rng.get_state()

    def settle(self, *, kept: bool) -> None:
        """End a step. `kept`: whether its gradients were applied. Otherwise the state before the step is restored."""
        before, self._before = self._before, None
        if before is None or kept:
            return
        self._state.iter, then, draws = before
        self._state.rng.set_state(draws)
        for now, earlier in zip(self._kept, then, strict=True):
            now.clear()
            now.update(earlier)

    def prepare(self, number: int, bucket: Bucket) -> None:
        """Store the errors of a bucket's parameters under the bucket's number, where torch's hook looks."""
        found = [self._ahead.pop(id(p), (p, None))[1] for p in bucket.parameters()] if self._ahead else []
        if any(left is not None for left in found):
            pairs = zip(found, bucket.parameters(), strict=True)
            # In its first steps the hook does not compress, and these errors wait.
            self._errors[number] = torch.cat([p.new_zeros(p.numel()) if e is None else e for e, p in pairs])
