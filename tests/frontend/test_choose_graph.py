"""The order in which front ends are attempted, and the messages about each."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from fxsplit.errors import TraceError
from fxsplit.frontend import choose_graph
from fxsplit.frontend.graph import Graph
from fxsplit.frontend.subject import Subject
from fxsplit.ir.facts.capture.scope import Scope
from tests.frontend.subjects import Scale, make_subject, trace


@dataclass
class Fake:
    """A front end that fails in the first submodule of `needs` that is not whole; with None it always fails."""

    name: str
    needs: tuple[str, ...] | None
    attempts: list[tuple[str, ...]] = field(default_factory=list)
    bounds: tuple[int, int | None] = (1, None)

    def attempt(self, subject: Subject) -> Graph:
        self.attempts.append(subject.whole)
        if self.needs is None:
            raise TraceError(f"{self.name} fails")
        for path in self.needs:
            if not any(f"{path}.".startswith(f"{whole}.") for whole in subject.whole):
                raise TraceError(f"{self.name} fails", submodule=path)
        return Graph(trace(subject.model), Scope(subject.inputs, self.name, bounds=self.bounds))


def attempt(monkeypatch: pytest.MonkeyPatch, symbolic: Fake, export: Fake, subject: Subject) -> Graph:
    monkeypatch.setattr(choose_graph, "SymbolicTrace", lambda: symbolic)
    never = Fake("export for every length", None)
    monkeypatch.setattr(
        choose_graph,
        "TorchExport",
        lambda lengths_vary=False, rows_vary=True: export if rows_vary > lengths_vary else never,
    )
    return choose_graph.choose_graph(subject)[0]


class Nested(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Scale(), nn.Sequential(Scale(), Scale()))


def test_export_is_attempted_where_tracing_fails_and_nothing_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    symbolic, export = Fake("symbolic", None), Fake("export", ())
    assert attempt(monkeypatch, symbolic, export, make_subject(Scale())).scope.front_end == "export"
    assert (len(symbolic.attempts), len(export.attempts)) == (1, 1)
    symbolic, export = Fake("symbolic", ()), Fake("export", ())
    assert attempt(monkeypatch, symbolic, export, make_subject(Scale())).scope.front_end == "symbolic"
    assert not export.attempts


def test_submodules_that_fail_stay_whole_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    symbolic, export = Fake("symbolic", ("1.0", "1")), Fake("export", None)
    with pytest.warns(UserWarning, match=r"'1' of Nested stays whole, .*\(export fails; symbolic fails\)") as said:
        graph = attempt(monkeypatch, symbolic, export, make_subject(Nested()))
    assert graph.scope.front_end == "symbolic, with submodules kept whole"
    assert symbolic.attempts == [(), ("1.0",), ("1",)], "what lies inside of 1 need not stay whole any more"
    assert len(said) == 1 and len(export.attempts) == 1


def test_export_around_submodules_is_the_last_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    symbolic, export = Fake("symbolic", None), Fake("export", ("0",))
    with pytest.warns(UserWarning, match="'0' of Nested stays whole"):
        graph = attempt(monkeypatch, symbolic, export, make_subject(Nested(), whole=("1",)))
    assert graph.scope.front_end == "export, with submodules kept whole"
    assert export.attempts == [("1",), ("1", "0")] and symbolic.attempts == [("1",)]


def test_the_error_has_both_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match=r"export fails\. Before that, symbolic fails"):
        attempt(monkeypatch, Fake("symbolic", None), Fake("export", None), make_subject(Scale()))


def test_a_submodule_that_is_whole_already_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front end that keeps failing in a submodule that should be whole would loop forever."""

    class Stuck(Fake):
        def attempt(self, subject: Subject) -> Graph:
            self.attempts.append(subject.whole)
            raise TraceError("stuck", submodule="0")

    symbolic = Stuck("symbolic", None)
    with pytest.raises(TraceError, match="Before that, stuck"):
        attempt(monkeypatch, symbolic, Fake("export", None), make_subject(Nested()))
    assert symbolic.attempts == [(), ("0",)]


@pytest.mark.parametrize(("bounds", "least"), [((2, None), 1), ((3, 8), 3), ((1, None), 1)])
def test_one_row_is_tried_where_the_exporter_has_not(
    monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, int | None], least: int
) -> None:
    export = Fake("export", (), bounds=bounds)
    graph = attempt(monkeypatch, Fake("symbolic", None), export, make_subject(Scale()))
    assert graph.scope.bounds == (least, bounds[1])


def test_a_model_that_refuses_one_row_keeps_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever way: a graph of edges failed with torch's bare IndexError."""

    class Several(Scale):
        def forward(self, x: Tensor) -> Tensor:
            torch._assert(x.shape[0] > 1, "several rows")
            return x * self.scale

    class Edges(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + x[torch.tensor([1, 0])].sum()

    for model in (Several(), Edges()):
        export = Fake("export", (), bounds=(2, None))
        graph = attempt(monkeypatch, Fake("symbolic", None), export, make_subject(model))
        assert graph.scope.bounds == (2, None)


def test_a_graph_module_is_taken_as_it_is() -> None:
    graph, _ = choose_graph.choose_graph(make_subject(trace(Scale())))
    assert graph.scope.front_end == "graph_module"


def test_all_of_a_class_stay_whole_once_two_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of twenty was an attempt of its own, and after sixteen the model was refused."""
    model = nn.Sequential(*(nn.Sequential(Scale(), nn.Tanh()) for _ in range(20)))
    symbolic = Fake("symbolic", tuple(f"{i}.0" for i in range(20)))
    with pytest.warns(UserWarning, match=r"'0.0' of Sequential stays whole \(Scale\), and so do 19 more of its class"):
        attempt(monkeypatch, symbolic, Fake("export", None), make_subject(model))
    assert [len(whole) for whole in symbolic.attempts] == [0, 1, 20]
