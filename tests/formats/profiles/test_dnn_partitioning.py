"""The dnn-partitioning JSON: homes of backward nodes, orphans, and nodes without support on accelerators."""

from __future__ import annotations

from typing import Any

import pytest

from fxsplit.errors import ProfileError
from fxsplit.formats.profiles.dnn_partitioning import BYTES_PER_MS, LEAST, NEVER, parse
from fxsplit.formats.profiles.foreign import ProfileFile


def node(number: int, color: int | None = None, backward: bool = False, **fields: Any) -> dict[str, Any]:
    """A node of 1 ms on an accelerator, 10 ms on a host, and 100 bytes."""
    given = {"id": number, "name": f"n{number}", "fpgaLatency": 1.0, "cpuLatency": 10.0, "size": 100.0}
    return given | {"isBackwardNode": int(backward), "colorClass": color, "supportedOnFpga": 1} | fields


def edge(source: int, target: int, ms: float = 0.5, size: float = 8.0) -> dict[str, Any]:
    return {"sourceId": source, "destId": target, "cost": ms, "size": size}


def read(nodes: list[dict[str, Any]], edges: list[dict[str, Any]], by_bytes: bool = False, **top: Any) -> ProfileFile:
    return parse({"maxSizePerFPGA": 1000.0, "nodes": nodes, "edges": edges, **top}, "file", by_bytes)


def test_a_backward_node_is_placed_with_the_first_forward_node_of_its_class() -> None:
    costs = read([node(0, 1), node(1, 1), node(2, 1, backward=True)], [edge(0, 1)]).costs
    assert [(n.name, n.forward_ms, n.backward_ms, n.buffer_bytes, n.host_ms) for n in costs.nodes] == [
        ("n0", 1.0, 1.0, 200.0, 20.0),
        ("n1", 1.0, 0.0, 100.0, 10.0),
    ]
    assert costs.together == (("n0", "n1"),) and costs.by_name["n1"].inputs == ("n0",)


def test_orphans_of_one_class_share_a_home_and_others_do_not() -> None:
    nodes = [node(0), node(1, 7, backward=True), node(2, 7, backward=True), node(3, None, backward=True)]
    costs = read(nodes, [edge(0, 1), edge(0, 3)]).costs
    assert {n.name: n.backward_ms for n in costs.nodes} == {"n0": 0.0, "n1": 2.0, "n3": 1.0}


def test_backward_runs_against_the_order_of_homes() -> None:
    """The orphan feeds the backward of n1, so it comes after n1; a cycle through it only keeps both together."""
    nodes = [node(0, 1), node(1, 2), node(2, 2, backward=True), node(3, None, backward=True)]
    costs = read(nodes, [edge(0, 1), edge(3, 2)]).costs
    assert costs.by_name["n3"].inputs == ("n1",) and costs.together == ()
    knot = read(nodes, [edge(0, 1), edge(3, 2), edge(2, 3)]).costs
    assert knot.together == (("n1", "n3"),) or knot.together == (("n3", "n1"),)
    assert {n.name: n.inputs for n in knot.nodes}["n3"] == ()


def test_what_an_accelerator_does_not_support_takes_longer_than_all_else() -> None:
    profile = read([node(0, supportedOnFpga=0), node(1)], [])
    total = 2.0 + 1.0
    assert profile.costs.by_name["n0"].forward_ms == NEVER * total == profile.never_ms
    assert profile.costs.by_name["n0"].host_ms == 10.0 and profile.costs.by_name["n1"].forward_ms == 1.0


def test_tensors_are_sent_once_to_each_home() -> None:
    nodes, edges = [node(0), node(1), node(2)], [edge(0, 1), edge(0, 2), edge(1, 2, ms=0.0, size=3.0)]
    (exchange,) = read(nodes, edges).costs.exchanges
    assert exchange.nodes == ("n0", "n1", "n2") and exchange.output_bytes == 0.5 * BYTES_PER_MS
    sizes = {e.nodes: e.output_bytes for e in read(nodes, edges, by_bytes=True).costs.exchanges}
    assert sizes == {("n0", "n1", "n2"): 8.0, ("n1", "n2"): 3.0}


def test_the_machine_that_the_file_states() -> None:
    profile = read([node(0)], [], maxFPGAs=3, maxCPUs=2, maxSizePerFPGA=500.0)
    assert (profile.accelerators, profile.hosts, profile.memory_bytes) == (3, 2, 500.0)
    assert profile.nominal_bytes_per_ms == BYTES_PER_MS and profile.bytes_per_s == 1000 * BYTES_PER_MS
    assert read([node(0)], [], by_bytes=True, maxSizePerFPGA=0.0).nominal_bytes_per_ms == 0.0
    assert read([node(0)], [], maxSizePerFPGA=0.0).memory_bytes == LEAST


def test_names_that_are_not_unique_get_their_ids() -> None:
    costs = read([node(0, name="same"), node(1, name="same")], []).costs
    assert [n.name for n in costs.nodes] == ["same#0", "same#1"]


def test_no_size_is_negative() -> None:
    with pytest.raises(ProfileError, match="'file' has maxSizePerFPGA=-1: give a finite number, zero or more"):
        read([node(0)], [], maxSizePerFPGA=-1)
    with pytest.raises(ProfileError, match="'file' has maxCPUs=True: give a whole number of devices"):
        read([node(0)], [], maxSizePerFPGA=1, maxCPUs=True)
