"""PipeDream's graph.txt, line by line."""

from __future__ import annotations

import pytest

from fxsplit.errors import ProfileError
from fxsplit.formats.profiles.foreign import ProfileFile
from fxsplit.formats.profiles.pipedream import parse


def line(name: str, what: str, *figures: str) -> str:
    names = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
    return f"{name} -- {what} -- " + ", ".join(f"{n}={f}" for n, f in zip(names, figures, strict=False))


def read(*lines: str) -> ProfileFile:
    return parse("\n".join(lines), "graph.txt")


def test_a_node() -> None:
    (node,) = read(line("n", "Conv -- 3x3", "1.5", "2.5", "[8.0; 4.0; 0.5]", "16.0")).costs.nodes
    assert (node.name, node.op) == ("n", "Conv -- 3x3"), "a description may hold the separator"
    assert (node.forward_ms, node.backward_ms, node.parameter_bytes, node.buffer_bytes) == (1.5, 2.5, 16.0, 0)
    assert node.output_bytes == node.gradient_bytes == node.kept_bytes == 12.5, "a list of sizes counts as its sum"


def test_inputs_cost_nothing_and_only_nodes_without_makers_are_inputs() -> None:
    profile = read(
        line("x", "Input0", "9", "9", "4", "0"),
        line("a", "Input of a block", "1", "2", "4", "0"),
        line("free", "Constant", "1", "2", "4", "0"),
        "\tx -- a",
        "",
        "\ta -- free",
    )
    assert [(i.name, i.output_bytes) for i in profile.costs.inputs] == [("x", 4.0)]
    assert [n.name for n in profile.costs.nodes] == ["a", "free"]
    assert profile.format == "pipedream" and profile.accelerators is None


@pytest.mark.parametrize(
    ("figures", "together"),
    [
        (("0", "0", "4", "0"), (("a", "b"),)),
        (("1", "0", "4", "0"), ()),
        (("0", "1", "4", "0"), ()),
        (("0", "0", "4", "1"), ()),
    ],
)
def test_an_unread_result_without_costs_stays_with_its_maker(figures: tuple[str, ...], together: object) -> None:
    a, b = line("a", "LSTM", "1", "1", "4", "0"), line("b", "getitem", *figures)
    assert read(a, b, " a -- b").costs.together == together
    given = read(line("x", "Input", "0", "0", "4", "0"), a, line("b", "getitem", *figures), " x -- b")
    assert given.costs.together == (), "an input is in no stage to stay in"


def test_the_last_place_is_named() -> None:
    with pytest.raises(ProfileError, match=r"'graph.txt', line 2: parameter_size= is missing"):
        read(line("a", "ReLU", "1", "1", "4", "0"), line("b", "ReLU", "1", "1", "4"))
    with pytest.raises(ProfileError, match=r"'graph\.txt', line 1: activation_size=1e60: give a finite number"):
        read(line("a", "ReLU", "1", "1", "1e60", "0"))
    with pytest.raises(ProfileError, match=r"'graph\.txt' has no nodes"):
        read(line("x", "Input", "0", "0", "4", "0"))
