"""An IR read from its text: byte for byte, with the facts that are made again, and errors that name the place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.api.toolkit.parse_ir import parse_ir
from fxsplit.errors import IRSyntaxError, MissingFact
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.stages import Stages
from fxsplit.ir.graph import IR
from fxsplit.ir.manager import run_chain
from fxsplit.ir.text.write import render
from fxsplit.passes import Augment, Order, Partition
from tests.support.models import Residual


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the dump of a residual network, planned from stated times."""
    folder = tmp_path_factory.mktemp("dump")
    options = {"example_inputs": torch.randn(8, 3, 8, 8), "n_microbatches": 4, "dump": folder}
    with fxsplit.compile(Residual(), 2, passes="profile{repeats=1},augment,order,partition,emit", **options):  # type: ignore[arg-type]
        pass
    return folder


def read(path: Path, *, torch: bool = False) -> IR:
    """Return the IR in a file."""
    return parse_ir(path.read_text(), path.name, torch=torch)


@pytest.mark.parametrize("with_torch", [False, True])
def test_every_file_of_a_dump_comes_back_byte_for_byte(dump: Path, with_torch: bool) -> None:
    files = sorted(dump.glob("*.ir"))
    assert len(files) == 8
    for path in files:
        assert render(read(path, torch=with_torch)) == path.read_text()


def test_a_read_ir_is_planned_as_the_captured_one(dump: Path) -> None:
    planned = read(dump / "04-partition.ir")[fxsplit.Plan]
    again = run_chain(read(dump / "03-order.ir"), [Partition()])[fxsplit.Plan]
    assert str(again) == str(planned) and again.stages == planned.stages and again.optimal
    fresh = run_chain(read(dump / "01-profile.ir"), [Augment(), Order(), Partition()])
    assert fresh[fxsplit.Plan].stages == planned.stages
    # The emitted stages have no costs, so their plan is stored with all its figures.
    chosen = read(dump / "05-schedule.ir")[fxsplit.Plan]
    assert read(dump / "06-emit.ir")[fxsplit.Plan].stages == chosen.stages
    assert [stage.nodes for stage in chosen.stages] == [stage.nodes for stage in planned.stages]


def test_derived_facts_are_made_again_when_they_are_asked_for(dump: Path) -> None:
    ir = read(dump / "03-order.ir")
    assert len(ir[States]) == len(ir[Antichains]) and ir[Antichains] is ir[Antichains]
    assert render(ir) == (dump / "03-order.ir").read_text()
    # Other costs outdate them.
    costs = ir[fxsplit.Costs]
    other = ir.learn(replace(costs, rows=costs.rows + 1))
    assert "Antichains" not in [kind.__name__ for kind in other.facts]
    with pytest.raises(MissingFact, match=r"no States (any more|yet)"):
        other[States]
    with pytest.raises(
        MissingFact, match=r"Stages is only a comment in the text that this IR was read from.*run 'emit'"
    ):
        read(dump / "06-emit.ir")[Stages]


def test_a_graph_on_its_model_computes_what_the_model_does(dump: Path) -> None:
    model, x = Residual(), torch.randn(4, 3, 8, 8)
    ir = fxsplit.load_ir(dump / "03-order.ir", model)
    torch.testing.assert_close(ir.gm(x), model(x), rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="without the model that its modules belong to"):
        fxsplit.load_ir(dump / "03-order.ir").gm(x)
    with pytest.raises(IRSyntaxError, match=r"needs submodule 'stem.0', which this model lacks"):
        fxsplit.load_ir(dump / "03-order.ir", nn.Linear(2, 2))
    model.stem[0] = nn.Conv2d(3, 8, 3)
    with pytest.raises(
        IRSyntaxError, match=r"'stem.0' is Conv2d\(3, 8, kernel_size=\(3, 3\), stride=\(1, 1\)\) in this model"
    ):
        fxsplit.load_ir(dump / "03-order.ir", model)


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_a_bound_is_only_for_the_costs_that_it_was_found_for(dump: Path, factor: float) -> None:
    text = (dump / "04-partition.ir").read_text()
    line = next(line for line in text.split("\n") if "call_module:stem.0 " in line)
    ms = read(dump / "04-partition.ir")[fxsplit.Costs].nodes[0].forward_ms
    assert f" {ms!r} " in line
    changed = parse_ir(text.replace(line, line.replace(f" {ms!r} ", f" {ms * factor!r} ", 1)), "a.ir", torch=False)
    assert changed[fxsplit.Plan].standing == "not proven"
    again = run_chain(changed, [Augment(), Order(), Partition()])[fxsplit.Plan]
    assert again.optimal and render(parse_ir(render(changed), "b.ir")) == render(changed)


def test_save_and_load(tmp_path: Path) -> None:
    ir = fxsplit.capture(Residual(), torch.randn(8, 3, 8, 8), devices=2)
    ir.save(tmp_path / "a.ir")
    again = fxsplit.load_ir(tmp_path / "a.ir")
    assert f"{again}\n" == f"{ir}\n" == (tmp_path / "a.ir").read_text() and "\n" not in repr(again)
    with pytest.raises(fxsplit.FxsplitError, match=r"cannot read .*no\.ir"):
        fxsplit.load_ir(tmp_path / "no.ir")


COLUMNS = "name module inputs op signature parameter_bytes buffer_bytes kept_bytes output_bytes gradient_bytes "
COLUMNS += "forward_ms backward_ms"
SMALL = """fxsplit-ir 1
model Net

graph Net {
  %x = input x()
  %a = module a(%x)
  %b = module b(%a)
  return %b
}

fact Machine {
  devices {
    name
    one
    two
  }
  links (inf,)
}

fact Workload {
  schedule 1F1B
  n_microbatches 4
  in_flight {1: (1,), 2: (2, 1)}
}

fact Costs {
  nodes {
    COLUMNS
    a a (x,) call_module:a "" 8 0 0 64 64 1.0 2.0
    b b (a,) call_module:b "" 8 0 0 64 64 2.0 4.0
  }
  inputs {
    name output_bytes gradient_bytes
    x    64           0
  }
  outputs (b,)
  rows 2
}
""".replace("COLUMNS", COLUMNS)
PLAN = """
fact Plan {
  stages {
    devices nodes
    (0,)    (a,)
    (1,)    (b,)
  }
}
"""


def test_a_hand_written_text_comes_out_equal_from_the_second_round_on() -> None:
    ir = parse_ir(SMALL + PLAN + "\n; a remark of mine\n", "a.ir")
    first = render(ir)
    assert render(parse_ir(first, "b.ir")) == first and "remark" not in first
    plan = ir[fxsplit.Plan]
    assert [s.load_ms for s in plan.stages] == [3.0, 6.0] and plan.standing == "not proven" and plan.speedup == 1.5


def test_latencies_and_transfers_come_back() -> None:
    """With them the price of a plan changes: 1.5 ms for a value and 1.5 ms for a gradient."""
    late = SMALL.replace("links (inf,)", "links (inf,)\n  latencies_ms (1.5,)\n  transfers blocking")
    ir = parse_ir(late + PLAN, "a.ir")
    assert render(parse_ir(render(ir), "b.ir")) == render(ir)
    plan, machine = ir[fxsplit.Plan], ir[fxsplit.Machine]
    assert machine.latencies_ms == (1.5,) and machine.transfers == plan.transfers == "blocking"
    assert [s.load_ms for s in plan.stages] == [6.0, 9.0]
    laid_out = machine.unrolled(((0,), (1,), (1,), (0,)))
    assert "1500 us" in str(laid_out) and "blocking transfers" in str(laid_out)
    for wrong, said in (("(1.5, 1.5)", "2 latencies of 1 links"), ("(-1.5,)", "a latency of -1.5 ms")):
        with pytest.raises(IRSyntaxError, match=said):
            parse_ir(late.replace("(1.5,)", wrong), "a.ir")
    with pytest.raises(IRSyntaxError, match="transfers='blocked': give asynchronous or blocking; did you mean"):
        parse_ir(late.replace("blocking", "blocked"), "a.ir")


def test_a_text_cut_anywhere_is_an_error_of_its_own() -> None:
    text = SMALL + PLAN
    for end in range(0, len(text), 7):
        try:
            parse_ir(text[:end], "a.ir", torch=False)
        except IRSyntaxError as error:
            assert str(error).startswith("a.ir:")


def test_the_moments_of_the_schedule_come_back() -> None:
    machine = fxsplit.Machine.planned(4)
    from fxsplit.api.plan import lay_out
    from fxsplit.schedule.generators.catalogue import find_moments

    for schedule in ("1F1B", "GPipe", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble", "Chimera", "PipeDream"):
        laid_out, workload = lay_out(machine, schedule, 8)
        found, count = find_moments(replace(workload, moments=None), laid_out), len(laid_out)
        assert found is not None and workload.moments is not None
        assert found.get(count) == workload.moments.get(count) is not None
