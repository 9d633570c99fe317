"""Steps share everything with their model but forward()."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxsplit.api.generation.steps import list_parameters, make_twin, name_cache


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.by = nn.Linear(3, 3), 2.0

    def forward(self, x: Tensor, more: float = 0.0) -> Tensor:
        result: Tensor = self.layer(x) * self.by + more
        return result


def test_a_twin_is_the_model_with_another_forward() -> None:
    model = Scaled()
    twin = make_twin(model, forward=lambda self, x: Scaled.forward(self, x, more=1.0))
    x = torch.randn(2, 3)
    assert torch.equal(twin(x), model(x) + 1)
    assert isinstance(twin, Scaled) and type(twin).__name__ == "Scaled"
    assert [id(w) for w in twin.parameters()] == [id(w) for w in model.parameters()]


def test_what_is_changed_on_one_is_changed_on_both() -> None:
    model = Scaled()
    twin = make_twin(model, forward=Scaled.forward)
    twin.eval()
    twin.by = 5.0
    model.layer = nn.Linear(3, 3)
    assert not model.training and model.by == 5.0 and twin.layer is model.layer


def test_arguments_are_those_of_the_class() -> None:
    model = Scaled()
    vars(model)["forward"] = torch.tanh
    assert list_parameters(model) == ["self", "x", "more"]


def test_the_cache_has_the_name_that_the_model_gives_it() -> None:
    """transformers renamed it in 5.24, and both names must work."""

    class Newer(nn.Module):
        def forward(self, input_ids: Tensor, cache: object = None) -> Tensor:
            return input_ids

    class Older(nn.Module):
        def forward(self, input_ids: Tensor, past_key_values: object = None) -> Tensor:
            return input_ids

    assert name_cache(Newer()) == "cache" and name_cache(Older()) == "past_key_values"
