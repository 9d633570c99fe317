"""The memory of a stage in each of its actions, computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fxsplit.api.plan import lay_out
from fxsplit.formats.plan_json import parse_plan, plan_to_dict
from fxsplit.ir.facts.costs.costs import Costs, InputCost, NodeCost, TiedParameter
from fxsplit.ir.facts.costs.forwards import keep_forwards
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.memory.microbatch import MicrobatchMemory, follow_stage, list_crossings
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from tests.support.graphs import node

SIZES = {"output_bytes": 4, "gradient_bytes": 4, "forward_peak_bytes": 4, "storage_bytes": 4}


def made(name: str, inputs: list[str], **figures: Any) -> NodeCost:
    """A node that makes 4 bytes and allocates nothing else, but for the given figures."""
    return node(name, inputs, **SIZES | {"unkept_bytes": 4} | figures)


def kept(name: str, inputs: list[str], **figures: Any) -> NodeCost:
    """Such a node with an output that a backward keeps."""
    return made(name, inputs, **{"unkept_bytes": 0, "kept_bytes": 4} | figures)


def follow(costs: Costs, *stages: str, recompute: bool = False) -> list[MicrobatchMemory]:
    """Return the memory of stages with nodes of one letter each."""
    stage_of = {name: i for i, names in enumerate(stages) for name in names}
    crossings = list_crossings(costs, stage_of, len(stages))
    return [
        follow_stage(costs, list(names), crossings[i], recompute=recompute, last=i == len(stages) - 1)
        for i, names in enumerate(stages)
    ]


def chain(*nodes: NodeCost) -> Costs:
    """Return a graph of these nodes on an input of 2 bytes; the last node makes the output."""
    return Costs(nodes, (InputCost("x", 2, 0),), (nodes[-1].name,), rows=1)


def test_a_stage_between_others() -> None:
    costs = chain(
        kept("a", ["x"], backward_peak_bytes=0),
        made("b", ["a"], forward_peak_bytes=6, backward_peak_bytes=9),
        kept("c", ["b"], backward_peak_bytes=4),
        kept("d", ["c"], backward_peak_bytes=4),
    )
    first, second, last = follow(costs, "a", "bc", "d")
    assert first.resting_bytes == 2 + 4 and first.forward_bytes == 2 + 4, "what it gives is kept"
    assert first.whole_bytes == 2 + 4 + 4, "the gradient that it was sent is there all the time"
    assert second.resting_bytes == 4 + 4, "of b nothing is kept"
    assert second.forward_bytes == 4 + 4 + 4, "while c runs: the input, b and c"
    # While b runs backward: the input, the gradient of c that was sent, c that is given on, the gradient of b.
    assert second.whole_bytes == 4 + 4 + 4 + 4 + 9
    assert second.sent_gradient_bytes == 4 and first.sent_gradient_bytes == 0 and second.sent_bytes == 0
    # The memory kept by the loss, a gradient inside it, and the gradient that it returns.
    assert last.resting_bytes == 4 + 4 + 4 and last.whole_bytes == 4 + 4 + 3 * 4


def test_a_stage_that_recomputes_holds_what_it_was_given() -> None:
    costs = chain(kept("a", ["x"]), kept("b", ["a"]), kept("c", ["b"], backward_peak_bytes=4))
    first, last = follow(costs, "ab", "c", recompute=True)
    assert first.resting_bytes == 2 and first.sent_bytes == 4
    assert first.forward_bytes == 2 + 4 + 4, "a and b, without what a backward would keep besides"
    assert first.whole_bytes == 2 + 4 + 4 + 4 + 4, "both, the gradient that it was sent, and that of a"
    assert last.resting_bytes == 4 + 2 * 4, "the outputs, and what the loss keeps of them"


def test_gradients_that_are_handed_on_are_one_piece_of_memory() -> None:
    """A concatenation returns parts of its gradient; each part kept all of it and was counted besides."""
    nodes = [
        kept("a", ["x"], backward_peak_bytes=0),
        kept("b", ["x"], backward_peak_bytes=0),
        made("c", ["a", "b"], output_bytes=8, gradient_bytes=8, lent_bytes=8, storage_bytes=8, forward_peak_bytes=8),
        kept("d", ["c"], backward_peak_bytes=8),
    ]
    (lent,) = follow(chain(*nodes), "abcd")
    assert lent.whole_bytes == 2 + 12 + 4 + 8, "the gradient of d, and that of c, which those of a and b are parts of"
    (copied,) = follow(chain(*nodes[:2], replace(nodes[2], lent_bytes=0.0, backward_peak_bytes=8.0), nodes[3]), "abcd")
    assert copied.whole_bytes == 2 + 8 + 8 + 8, "the gradient of c and copies of its parts"


def test_gradients_of_several_readers_are_summed_in_place_where_nothing_shares_them() -> None:
    """The sum of two gradients that are shared is a third piece of memory for a moment."""

    def find(lent: float) -> float:
        sums = {"lent_bytes": lent, "backward_peak_bytes": 4.0 - lent}
        costs = chain(kept("a", ["x"]), made("b", ["a"], **sums), made("c", ["a", "b"], lent_bytes=8.0))
        return follow(costs, "abc", "")[0].whole_bytes

    # The input, a, the output c, its sent gradient, in which those of a and b lie at first, and the sum.
    assert find(lent=4.0) == 2 + 4 + 4 + 4 + 4
    assert find(lent=0.0) == 2 + 4 + 4 + 4 + 4 + 4, "b makes another one for a"


def test_weights_that_wait_hold_the_gradient_that_has_arrived() -> None:
    figures = {"halved_peak_bytes": 4, "backward_peak_bytes": 7, "late_peak_bytes": 3, "waiting_bytes": 4}
    costs = chain(*(kept(n, [before], parameter_bytes=3, **figures) for n, before in zip("abc", "xab", strict=True)))
    first, last = follow(costs, "ab", "c")
    assert first.halfway_bytes == 2 + 8 + 2 * 4, "for each of two weights a gradient"
    assert first.early_bytes == 2 + 8 + 4 + 4 + 4, "what was kept, and the gradients of b, of a, and of the input"
    assert first.late_bytes == first.halfway_bytes + 3 + 6, (
        "one weight's gradient, and small ones before they are added"
    )
    assert last.halfway_bytes == 4 + 4 + 4 + 4, "the loss keeps what it needs, too"
    plain = chain(*(kept(n, [before]) for n, before in zip("abc", "xab", strict=True)))
    (one, _) = follow(plain, "ab", "c")
    assert one.early_bytes == one.whole_bytes, "nothing waits, and all is freed"
    assert one.halfway_bytes == 2 + 4, "but the value that was given on"


def test_the_gradient_of_a_tied_parameter_is_there_from_its_last_user_to_its_first() -> None:
    costs = chain(kept("a", ["x"], parameter_bytes=9), kept("b", ["a"]), kept("c", ["b"], parameter_bytes=9))
    tied = replace(costs, tied=(TiedParameter(9.0, 0.0, ("a", "c")),))
    assert follow(tied, "abc", "")[0].whole_bytes >= follow(costs, "abc", "")[0].whole_bytes + 9 - 4
    assert follow(tied, "ab", "c") == follow(costs, "ab", "c"), "in two stages each has its own"


def test_gradients_of_several_outputs_wait_for_the_node_that_made_them() -> None:
    parts = [replace(made(n, ["s"]), op="call_function:getitem") for n in "ab"]
    split = node("s", ["x"], forward_peak_bytes=0, backward_peak_bytes=8 + 8, storage_bytes=8, kept_bytes=8)
    costs = chain(split, *parts, made("c", ["a", "b"], backward_peak_bytes=8))
    # Both gradients that the node gets for its parts, and the gradient that it makes of them.
    assert follow(costs, "sabc", "")[0].whole_bytes == pytest.approx(2 + 8 + 4 + 4 + 8 + 8)


def test_what_the_loss_was_computed_from_stays_for_the_first_half_of_a_backward() -> None:
    """These outputs used to be left out if the last stage recomputes, and the plan stated less memory than was held."""
    costs = chain(kept("a", ["x"], backward_peak_bytes=40, halved_peak_bytes=40))
    (found,) = follow(costs, "a", recompute=True)
    assert found.early_bytes == found.whole_bytes + costs.value_of["a"][1]


def test_forwards_alone_keep_nothing() -> None:
    costs = keep_forwards(chain(kept("a", ["x"]), kept("b", ["a"]), kept("c", ["b"])))
    first, last = follow(costs, "ab", "c")
    assert (first.resting_bytes, first.forward_bytes, first.sent_bytes) == (2 + 4, 2 + 4 + 4, 4)
    assert last.forward_bytes == 4 + 4


def test_a_plan_that_was_written_and_read_is_the_same_text() -> None:
    """Whole numbers of bytes were written as such, and read as floats: ranks took their plans for different ones."""
    costs = chain(kept("a", ["x"], parameter_bytes=3), kept("b", ["a"]))
    found = Planner(costs).plan(*lay_out(Machine.planned(2)), Options())
    text = json.dumps(plan_to_dict(found))
    assert json.dumps(plan_to_dict(parse_plan(json.loads(text), "a plan"))) == text


def test_what_later_nodes_keep_is_free_behind_their_backward() -> None:
    """The output of a used to count until a's own backward, although only b keeps it."""
    nodes = (kept("a", ["x"], backward_peak_bytes=50), made("b", ["a"], backward_peak_bytes=4))
    until_own, until_b = (
        follow(chain(replace(nodes[0], kept_for=name, kept_for_bytes=size), nodes[1], kept("c", ["b"])), "ab", "c")[0]
        for name, size in (("", 0.0), ("b", 4.0))
    )
    assert until_b.whole_bytes == until_own.whole_bytes - 4
    assert until_b.resting_bytes == until_own.resting_bytes


def test_a_view_takes_no_memory_besides_what_it_looks_at() -> None:
    nodes = [made("a", ["x"]), made("b", ["a"]), made("c", ["a", "b"]), made("d", ["c"])]
    own, view = (
        follow(chain(nodes[0], replace(nodes[1], lies_in=owner), *nodes[2:]), "abc", "d")[0] for owner in ("", "a")
    )
    assert own.forward_bytes == 2 + 4 + 4 + 4 and view.forward_bytes == 2 + 4 + 4
    given = follow(chain(nodes[0], replace(nodes[1], lies_in="a"), made("c", ["b"])), "ab", "c")[0]
    assert given.resting_bytes == 2 + 4, "what is given on is held, wherever it lies"


def test_the_first_backward_makes_the_sums_of_gradients() -> None:
    """They were counted from the start of a step."""
    figures = {"parameter_bytes": 10, "backward_peak_bytes": 14}
    costs = chain(*(kept(n, [before], **figures) for n, before in zip("abc", "xab", strict=True)))
    first, _ = follow(costs, "ab", "c")
    # While a runs backward the sum of b is there.
    assert first.first_bytes == first.whole_bytes + 10


def test_who_recomputes_keeps_what_its_buffers_were() -> None:
    costs = chain(kept("a", ["x"], written_bytes=3, buffer_bytes=3), kept("b", ["a"]))
    plain, again = (follow(costs, "a", "b", recompute=way)[0] for way in (False, True))
    assert plain.resting_bytes == 2 + 4 and again.resting_bytes == 2 + 3
