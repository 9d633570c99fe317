"""The kind of a plan in words, and its bytes by hand: a chain of two nodes with 300 and 500 bytes of parameters."""

from __future__ import annotations

from dataclasses import replace

import fxsplit
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.planner import Options
from fxsplit.schedule.taxonomy import classify_plan
from tests.support.graphs import node

NODES = (
    replace(node("a", [], 2.0, output_bytes=70.0, gradient_bytes=30.0), parameter_bytes=300.0),
    replace(node("b", ["a"], 2.0, output_bytes=4.0), parameter_bytes=500.0),
)
COSTS = Costs(NODES, (), ("b",), rows=1)


def test_a_pipeline_sends_values_and_gradients() -> None:
    kind = classify_plan(fxsplit.plan(COSTS, 2, n_microbatches=4))
    assert kind is not None
    assert kind.parallelism == "pipeline (2 stages of the model on 2 devices, 4 microbatches)"
    assert kind.synchronisation.startswith("synchronous (one optimizer step after all microbatches")
    assert kind.weights == "one device holds those of a stage"
    assert kind.sent_bytes == {"values forward": 280.0, "gradients back": 120.0, "sums of gradients": 0.0}
    assert kind.data_parallel_bytes == 2 * 800.0


def test_replicas_sum_their_gradients() -> None:
    """All three devices have the whole model, or two of them have its second stage."""
    options = Options(model="replicated", use_all=True)
    kind = classify_plan(fxsplit.plan(COSTS, 3, n_microbatches=6, options=options, together=[("a", "b")]))
    assert kind is not None
    assert kind.parallelism == "data (3 devices have the whole model, and share its microbatches)"
    assert kind.weights == "3 devices hold those of each stage"
    assert kind.sent_bytes == {"values forward": 0.0, "gradients back": 0.0, "sums of gradients": 2 * 2 * 800.0}
    assert kind.data_parallel_bytes == kind.sent_bytes["sums of gradients"]
    # The sum of the first node's gradients would take long, and the second node takes twice as long to compute.
    nodes = replace(NODES[0], parameter_bytes=9e6), replace(NODES[1], forward_ms=4.0, backward_ms=8.0)
    machine = fxsplit.Machine.planned(3, bytes_per_s=1e6)
    plan = fxsplit.plan(Costs(nodes, (), ("b",), rows=1), machine, n_microbatches=6, options=options)
    both = classify_plan(plan)
    assert both is not None and both.parallelism.startswith("pipeline and data (2 stages of the model on 3 devices")
    assert both.weights == "2 devices hold those of stage 1; one device holds those of another stage"
    assert both.sent_bytes == {"values forward": 420.0, "gradients back": 180.0, "sums of gradients": 2 * 500.0}


def test_asynchronous_schedules_bound_their_staleness() -> None:
    kind = classify_plan(fxsplit.plan(COSTS, 2, schedule="PipeDream", n_microbatches=8))
    assert kind is not None
    assert kind.synchronisation == (
        "bounded staleness (a gradient is applied at most 1 optimizer step late, and stages keep up to 2 versions of "
        "their weights)"
    )


def test_chimera_holds_weights_twice_and_one_device_sends_nothing() -> None:
    kind = classify_plan(fxsplit.plan(COSTS, 2, schedule="Chimera", n_microbatches=4))
    assert kind is not None and kind.weights == "2 devices hold those of each stage"
    assert kind.sent_bytes["sums of gradients"] == 2 * 800.0
    alone = classify_plan(fxsplit.plan(COSTS, 1, n_microbatches=4))
    assert alone is not None and alone.parallelism == "none (one device has the whole model)"
    assert {*alone.sent_bytes.values(), alone.data_parallel_bytes} == {0.0}


def test_inference_sends_values_only_and_other_plans_have_no_kind() -> None:
    kind = classify_plan(fxsplit.plan(COSTS, 2, inference=True, n_microbatches=4))
    assert kind is not None and kind.synchronisation == "none (no weight changes)"
    assert kind.list_bytes() == [("values forward", 280.0)]
    single = classify_plan(fxsplit.plan(COSTS, 2, n_microbatches=1))
    assert single is not None and single.parallelism.startswith("model (2 stages of the model on 2 devices")
    assert classify_plan(fxsplit.plan(COSTS, 2, options=Options(model="direct"))) is None
