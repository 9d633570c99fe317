"""Changes after compiling, in another mode, thread or process, are followed or refused, never ignored."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import fxsplit
from fxsplit.errors import InputError
from tests.support.models import FAST, FrozenNorm, Two

mse = F.mse_loss


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class Scaled(nn.Module):
    """Reads a number, and the mode of a submodule that is traced into."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Inside(), nn.Linear(8, 3)
        self.alpha = 2.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x) * self.alpha)
        return result


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x * 10 if self.training else x


def test_a_changed_attribute_is_compiled_again() -> None:
    model = Scaled()
    x = vectors()
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        model.alpha = -3.0  # a number becomes an input of the graph, without a warning
        torch.testing.assert_close(pipe(x), model(x))
        model.alpha = 4
        with pytest.warns(UserWarning, match=r"'alpha' of the model changed from a number to 4"):
            torch.testing.assert_close(pipe(x), model(x))
        model.body.eval()
        torch.testing.assert_close(pipe(x), model(x))
        pipe.eval()
        torch.testing.assert_close(pipe(x), model(x))
        model.train()
        torch.testing.assert_close(pipe.train()(x), model(x))


class Constant(nn.Module):
    """Makes a tensor from a number and the mode: tracing turns it into a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.bn = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.alpha: Any = 2.0
        self.extra: Any = None
        self.best = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(self.bn(x)) * torch.full((8,), 0.5 if self.training else self.alpha))
        h = h * 2 if self.bn.training else h
        result: Tensor = self.b(self.norm(h if self.extra is None else h * self.extra))
        return result


def test_constants_of_a_graph_follow_mode_and_attributes() -> None:
    model = Constant()
    x = vectors()
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=1, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        model.bn.eval()
        torch.testing.assert_close(pipe(x), model(x))
        pipe.eval()
        torch.testing.assert_close(pipe(x), model(x))
        model.alpha = 5.0
        torch.testing.assert_close(pipe(x), model(x))
        model.extra = torch.full((8,), 3.0)
        with pytest.warns(UserWarning, match="'extra' of the model changed"):
            torch.testing.assert_close(pipe(x), model(x))


def test_a_replaced_submodule_is_compiled_again() -> None:
    """The old submodule must not go on running."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    x = vectors()
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        model[2] = nn.Linear(8, 2)
        assert pipe(x).shape == (8, 2)
        torch.testing.assert_close(pipe(x), model(x))


LIBRARY = """
from torch import nn
class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)
        self.first.register_forward_hook(double)
    def forward(self, x):
        return self.second(self.first(x))
def double(module, args, out):
    return out * 2
"""


def test_hooks_of_the_library_of_a_part_are_in_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text model under adapters, for example, is inside a module of another library, which sets hooks on it."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "bodies.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    bodies = importlib.import_module("bodies")
    torch.manual_seed(0)
    model, x = nn.Sequential(bodies.Body(), nn.Linear(8, 3)), vectors()
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        # Neither this module nor a module around it is from the library.
        other = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), bodies.Body())
        other[0].register_forward_hook(bodies.double)
    with (
        fxsplit.compile(other, 2, n_microbatches=2, passes=FAST) as pipe,
        pytest.raises(InputError, match="submodule '0' has hooks"),
    ):
        pipe(x)


def test_hooks_that_would_not_run_are_refused() -> None:
    """Hooks on a submodule that the graph has no node for must not be skipped silently."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3))
    with fxsplit.compile(model, 2, example_inputs=vectors(), loss_fn=mse, passes=FAST) as pipe:
        handle = model[0].register_forward_hook(lambda m, args, out: out * 2)
        with pytest.raises(InputError, match=r"submodule '0' has hooks.*fxsplit.leaf\('0'\) in passes=.*such as '0.0'"):
            pipe(vectors())
        handle.remove()
        handle = model.register_forward_hook(lambda m, args, out: None)
        with pytest.raises(InputError, match="the model itself has hooks"):
            pipe.step(vectors(), target=torch.zeros(8, 3))
        pipe(vectors())


def test_hooks_for_all_modules_are_refused() -> None:
    """Layers would run them, but submodules that are cut inside would not."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3))
    with fxsplit.compile(model, 2, example_inputs=vectors(), passes=FAST) as pipe:
        handle = register_module_forward_hook(lambda m, args, out: out * 2)
        try:
            with pytest.raises(InputError, match=r"hooks for all modules .* submodule '0'.* remove them"):
                pipe(vectors())
        finally:
            handle.remove()
        pipe(vectors())


def test_a_replaced_parameter_is_used() -> None:
    """The graph must not keep the parameter that it was captured with."""
    model = FrozenNorm().train()
    x = vectors()
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        model.scale = nn.Parameter(torch.full((8,), 3.0))
        torch.testing.assert_close(pipe(x), model(x))


OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.mix(self.embed(ids)), self.head.weight)


def test_ties_that_change_after_compiling() -> None:
    """Weights that are untied after compiling must train separately, and weights that are tied must train as one."""
    model, ids = Tied(), torch.randint(0, 10, (8, 3))
    with fxsplit.compile(model, 2, example_inputs=ids, **OPTIONS) as pipe:
        pipe.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        with pytest.warns(UserWarning, match="'head.weight as' of the model changed"):
            pipe(ids).square().sum().backward()
        assert model.head.weight.grad is not None
        model.head.weight = nn.Parameter(torch.randn(10, 4))
        torch.testing.assert_close(pipe(ids), model(ids))


def test_a_replaced_tensor_attribute_is_followed() -> None:
    """A tensor attribute that is not a buffer must not keep its value from the capture."""

    class Scaled(Two):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x) * self.scale)
            return out

    model, x = Scaled(), rows()
    with fxsplit.compile(model, 2, example_inputs=x, **OPTIONS) as pipe:
        model.scale.mul_(2.0)
        torch.testing.assert_close(pipe(x), model(x))
        model.scale = torch.full((4,), 5.0)
        with pytest.warns(UserWarning, match="'scale' of the model changed"):
            found = pipe(x)
        torch.testing.assert_close(found, model(x))


class Plain(nn.Module):
    """Reads attributes of several kinds, and has some that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25)), nn.Linear(8, 8)
        self.scale, self.sizes, self.table = 2.0, (1, 2), torch.zeros(3)
        self.unread = 1
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x) * self.scale + len(self.sizes)
        result: Tensor = self.head(h if self.absent is None else h * self.absent)
        return result


def test_what_is_read_of_a_model_and_what_has_changed() -> None:
    """Only numbers that forward() reads count: a counter in the model must not cost a compile at every call."""
    model = Plain()
    with fxsplit.compile(model, 2, example_inputs=torch.randn(8, 8), passes=FAST) as pipe:
        compiled = pipe.compiler.get_compiled("train")
        assert compiled is not None
        validity = compiled.validity
        assert validity.attributes["body.1.p"] == "more than 0" and validity.attributes["head.training"] == "True"
        model.unread = 2
        assert validity.find_changes() == {}
        model.scale, model.absent = 3.0, nn.Parameter(torch.zeros(1))
        model.head.weight = model.get_parameter("body.0.weight")
        dropout = model.body[1]
        assert isinstance(dropout, nn.Dropout)
        dropout.p = 0.5
        assert "attribute 'body.1.p' of the model" not in validity.find_changes(), "the module reads its rate itself"
        dropout.p = 0.0
        del model.sizes
        assert validity.find_changes() == {
            "attribute 'absent' of the model": ("None", "'registered'"),
            "attribute 'body.1.p' of the model": ("more than 0", "0.0"),
            "attribute 'head.weight as' of the model": ("nothing", "body.0.weight"),
            "attribute 'sizes' of the model": ("(1, 2)", "nothing"),
            "attribute 'scale' of the model": ("2.0", "3.0"),
        }


def test_weights_without_values_are_named() -> None:
    model = Plain().to("meta")
    model.table = torch.zeros(3)
    with fxsplit.compile(model, 2, example_inputs=torch.randn(8, 8), passes=FAST) as pipe:
        compiled = pipe.compiler.get_compiled("train")
        assert compiled is not None
        with pytest.raises(fxsplit.FxsplitError, match=r"'body.0.weight' has no values yet.*pipe.load_weights\(path\)"):
            compiled.validity.check_weights()


def test_what_changes_after_it_was_seen_is_found_and_what_changes_back_is_not() -> None:
    """A model is not read in full between calls that change nothing, but a change must still be found."""
    model = Plain()
    with fxsplit.compile(model, 2, example_inputs=torch.randn(8, 8), passes=FAST) as pipe:
        compiled = pipe.compiler.get_compiled("train")
        assert compiled is not None
        find_changes = compiled.validity.find_changes
        dropout, head = model.body[1], model.head
        assert isinstance(dropout, nn.Dropout)
        own, tied, fixed = head.weight, model.get_parameter("body.0.weight"), nn.Parameter(torch.zeros(8, 8))
        changes: list[tuple[str, Any, Any]] = [
            ("head.training", lambda: head.eval(), lambda: head.train()),
            ("body.1.p", lambda: setattr(dropout, "p", 0.0), lambda: setattr(dropout, "p", 0.5)),
            ("head.weight as", lambda: setattr(head, "weight", tied), lambda: setattr(head, "weight", own)),
            ("head.more as", lambda: setattr(head, "more", own), lambda: delattr(head, "more")),
        ]
        for name, change, change_back in changes:
            assert find_changes() == {} and find_changes() == {}
            change()
            for _ in range(2):
                assert list(find_changes()) == [f"attribute {name!r} of the model"]
            change_back()
        head.weight = fixed
        assert find_changes() == {}, "a weight that is replaced is followed"


class Longer(nn.Module):
    """Computes its length without torch, so that it is exported, and for one length."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 100:
            x = x * 2
        places = torch.arange(len([*range(x.shape[1])]), dtype=x.dtype)
        result: Tensor = self.b(torch.tanh(self.a(x) + places[None, :, None]))
        return result


def test_the_dtypes_of_an_exported_graph_are_seen() -> None:
    model = Longer()
    with fxsplit.compile(model, 2, example_inputs=torch.randn(8, 5, 8), passes=FAST) as pipe:
        compiled = pipe.compiler.get_compiled("train")
        assert compiled is not None and compiled.validity.find_changes() == {}
        model.b.double()
        assert "attribute 'b.weight.dtype' of the model" in compiled.validity.find_changes()


def test_another_name_of_a_submodule_is_no_other_model() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    x = vectors()
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        before = pipe.compiler.get_compiled("train")
        model[0].add_module("again", model[1])
        pipe(x)
        assert pipe.compiler.get_compiled("train") is before
        model[0].add_module("again", nn.Identity())
        pipe(x)
        assert pipe.compiler.get_compiled("train") is not before
