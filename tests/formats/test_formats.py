"""Profiles of other tools: valid files are read, and invalid ones refused with file, place and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fxsplit.errors import FxsplitError, InputError, ProfileError
from fxsplit.formats import read
from fxsplit.formats.machine_toml import read_machine


def line(name: str, what: str, forward: str, backward: str, activation: str, parameters: str) -> str:
    times = f"forward_compute_time={forward}, backward_compute_time={backward}"
    return f"{name} -- {what} -- {times}, activation_size={activation}, parameter_size={parameters}\n"


PIPEDREAM = (
    line("node1", "Input", "9.0", "0.0", "40.0", "0.0")
    + line("node3", "LSTM(2, 2)", "2.0", "4.0", "[8.0; 4.0]", "16.0")
    + line("node2", "Linear", "1.0", "2.0", "8.0", "64.0")
    + line("node4", "__getitem__(1)", "0.0", "0.0", "4.0", "0.0")
    + "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node4\n\tnode2 -- node3\n"
)


def dnn(**changes: Any) -> dict[str, Any]:
    """A forward chain of three nodes, their backward mates, and a backward node without a mate."""
    names = ["a", "b", "c", "c'", "b'", "a'", "loss'"]
    colours = [1, 2, 3, 3, 2, 1, None]
    nodes = [
        {"name": name, "id": i, "fpgaLatency": 1.0 + i, "cpuLatency": 10.0, "size": 100.0, "supportedOnFpga": 1}
        | {"isBackwardNode": int(name[-1] == "'"), "colorClass": colour}
        for i, (name, colour) in enumerate(zip(names, colours, strict=True))
    ]
    pairs = [(0, 1), (1, 2), (6, 3), (3, 4), (4, 5)]
    edges = [{"sourceId": a, "destId": b, "cost": 0.5, "size": 10.0} for a, b in pairs]
    return {"maxSizePerFPGA": 1000.0, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges} | changes


def written(folder: Path, content: Any, name: str = "file") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_pipedream(tmp_path: Path) -> None:
    profile = read(written(tmp_path, PIPEDREAM))
    costs = profile.costs
    assert profile.format == "pipedream" and profile.unit == "ms"
    assert [i.name for i in costs.inputs] == ["node1"], "what the model is given costs nothing"
    assert [n.name for n in costs.nodes] == ["node2", "node3", "node4"]
    lstm = costs.by_name["node3"]
    assert (lstm.forward_ms, lstm.backward_ms, lstm.output_bytes, lstm.parameter_bytes) == (2.0, 4.0, 12, 16)
    assert lstm.inputs == ("node2",) and costs.together == (("node3", "node4"),)


def test_dnn_partitioning(tmp_path: Path) -> None:
    profile = read(written(tmp_path, dnn()))
    costs = profile.costs
    assert (profile.accelerators, profile.hosts, profile.memory_bytes) == (2, 1, 1000.0)
    assert profile.cost_model == "direct"
    home = costs.by_name
    assert (home["a"].forward_ms, home["a"].backward_ms) == (1.0, 6.0), "a backward node lies with its forward mate"
    assert home["b"].host_ms == 20.0 and home["b"].buffer_bytes == 200
    assert home["loss'"].backward_ms == 7.0 and home["loss'"].inputs == ("c",), "an orphan's place is mirrored"
    pins = sorted(e.nodes for e in costs.exchanges)
    assert pins == [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("loss'", "c")]
    assert {e.output_bytes for e in costs.exchanges} == {0.5 * profile.bytes_per_s / 1000}
    by_bytes = read(written(tmp_path, dnn()), by_bytes=True).costs
    assert {e.output_bytes for e in by_bytes.exchanges} == {10.0}


def changed(kind: str, index: int, **fields: Any) -> dict[str, Any]:
    """A dnn file in which one node or edge has other fields."""
    data = dnn()
    data[kind][index] |= fields
    return data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty: give an IR, or a profile"),
        ("hello\n", r"line 1 is neither a node .* nor an indented edge .*'hello'; is this a complete profile"),
        (PIPEDREAM + "\tnode3 -- node9\n", "line 9: edge node3 -- node9 names 'node9', which is no node"),
        (
            PIPEDREAM + "\tnode3 -- node2\n",
            r"has a cycle \(node[23] -> node[23] -> node[23]\)",
        ),
        (PIPEDREAM.replace("time=2.0", "time=-2.0", 1), r"line 2: forward_compute_time=-2.0: give a finite number"),
        (PIPEDREAM.replace("time=2.0", "time=nan", 1), r"forward_compute_time=nan: give a finite number"),
        (PIPEDREAM.replace("time=2.0", "time=fast", 1), r"forward_compute_time=fast is no number"),
        (PIPEDREAM[:150], "is missing; is the file cut off"),
        (PIPEDREAM.replace("node2 -- Linear", "node1 -- Linear"), "line 3: node 'node1' appears twice"),
        (json.dumps(dnn())[:-40], "is not a complete JSON file .is it cut off"),
        ("[1, 2]", "neither a node"),
        ("{}", "is not a profile"),
        (dnn(nodes=[]), "has no nodes"),
        (changed("nodes", 1, id=0), "node 1 has the id 0 of an earlier one"),
        (changed("nodes", 1, fpgaLatency=-1), "node 1 has fpgaLatency=-1: give a finite number"),
        (changed("nodes", 1, fpgaLatency=float("nan")), "holds NaN: every time and size must be a finite number"),
        (changed("edges", 1, destId=99), "edge 1: destId is 99, which is no node of the file"),
        (dnn(edges=[*dnn()["edges"], {"sourceId": 2, "destId": 0, "cost": 0.0}]), r"has a cycle \(. -> . -> . -> .\)"),
        (changed("nodes", 1, colorClass=[1]), r"node 1 has colorClass=\[1\]"),
        (changed("nodes", 1, fpgaLatency=10**400), "node 1 has fpgaLatency=1000.*: give a finite number"),
        (changed("nodes", 1, size=1e308), r"node 1 has size=1e\+308: give a finite number"),
        (changed("edges", 1, sourceId=[0]), r"edge 1: sourceId is \[0\]"),
        (dnn(edges=None), "has edges=None: give a list"),
        (dnn(maxFPGAs=1.5), "maxFPGAs=1.5: give a whole number of devices"),
    ],
)
def test_bad_profiles(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        read(written(tmp_path, content))


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\x80\x02}q\x00.")
    for name in ("nothing", "binary", "", "nul\0"):
        with pytest.raises(ProfileError, match="cannot read"):
            read(tmp_path / name)


MACHINE = """
bytes_per_s = 1e9
[[devices]]
name = "big"
count = 2
memory_bytes = 80e9
link_bytes_per_s = 300e9
[[devices]]
name = "small"
speed = 0.5
"""


def test_machine_toml(tmp_path: Path) -> None:
    machine = read_machine(written(tmp_path, MACHINE))
    assert [d.name for d in machine.devices] == ["big.0", "big.1", "small"]
    assert machine.links == (300e9, 1e9) and machine.devices[2].speed == 0.5
    assert machine.devices[0].memory_bytes == 80e9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no .*devices"),
        ("[[devices]]\ncount = 0", "count=0: give a whole number"),
        ("[[devices]]\nspeed = -1", "speed=-1: give a positive number"),
        ("[[devices]]\nmemory = 1", "has 'memory': known are"),
        ("links = 3\n[[devices]]", "has 'links'"),
        ("[[devices]", "cannot read a machine"),
        ("[[devices]]\nname='a'\n[[devices]]\nname='a'", "give each a name of its own"),
    ],
)
def test_bad_machines(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_machine(written(tmp_path, content))
    assert issubclass(InputError, FxsplitError)
