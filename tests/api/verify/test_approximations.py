"""Compressed cuts: plans count the bytes sent, gradients pass straight through, and verify measures the error."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.cli import main as cli
from fxsplit.errors import ChainError, InputError, PlanError, ProfileError
from fxsplit.ir.facts.costs.compress import HOW, Compress
from fxsplit.runtime.job import job as jobs
from fxsplit.runtime.job.compress import compress, restore
from tests.support.models import FAST, Mlp
from tests.support.titan_model import Titan

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


class Through(torch.autograd.Function):
    """A cut by hand: the value is compressed and restored, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, how: str) -> Tensor:
        ctx.how = how
        made: Tensor = restore(*compress([value], [True], how))[0][0]
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return restore(*compress([gradient], [], ctx.how))[0][0], None


def make_model() -> nn.Sequential:
    torch.manual_seed(2)
    layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("how", ["bf16", "int8"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1", "ZBVZeroBubble"])
def test_a_step_is_that_of_the_model_with_the_cuts_by_hand(how: Compress, schedule: str) -> None:
    """Outputs, the loss and all gradients. If stages go there and back, values that stay on a device are exact."""
    model = make_model()
    unsplit, x, y = copy.deepcopy(model), X.double(), Y.double()
    options: dict[str, Any] = {"schedule": schedule, "n_microbatches": 4, "loss_fn": nn.functional.mse_loss}
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, passes=FAST, compress=how, **options) as pipe:
        assert pipe.plan.compress == how
        loss, outputs = pipe.step(x, target=y, return_outputs=True)
        homes = [stage.device_name.split("/")[0] for stage in pipe.stages.stages]
        nodes = [stage.nodes for stage in pipe.plan.stages]
    total, found = 0.0, []
    for rows in (X.double().split(2),):
        for piece, target in zip(rows, y.split(2), strict=True):
            for number, names in enumerate(nodes):
                if number and homes[number] != homes[number - 1]:
                    piece = Through.apply(piece, how)  # type: ignore[no-untyped-call]
                for name in names:
                    piece = unsplit[int(name.removeprefix("_"))](piece)
            part = nn.functional.mse_loss(piece, target) / 4
            part.backward()
            total += float(part.detach())
            found.append(piece.detach())
    torch.testing.assert_close(outputs, torch.cat(found), rtol=1e-12, atol=1e-12)
    assert float(loss) == pytest.approx(total, rel=1e-12)
    for mine, own in zip(model.parameters(), unsplit.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, own.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("how", ["bf16", "int8"])
def test_what_is_sent_is_what_the_plan_says(how: Compress, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients of all microbatches, counted as they leave the job."""
    sent: list[int] = []

    def count(values: Any, about: Any, how: str) -> Any:
        made = compress(values, about, how)
        sent.append(sum(t.nbytes for t in made[0] if isinstance(t, Tensor)))
        return made

    monkeypatch.setattr(jobs, "compress", count)
    options: dict[str, Any] = {"n_microbatches": 4, "loss_fn": nn.functional.mse_loss, "passes": FAST}
    with fxsplit.compile(make_model().float(), ["cpu"] * 3, example_inputs=X, compress=how, **options) as pipe:
        pipe.step(X, target=Y)
        behind = pipe.plan.stages[1:]
        assert sum(sent) == 4 * sum(s.in_sent_bytes + s.in_sent_gradient_bytes for s in behind)
        assert sum(sent) < 0.6 * 4 * sum(s.in_bytes + s.in_gradient_bytes for s in behind)
        text = str(pipe.plan)
    assert f"cuts are compressed ({how}): " in text and "for a microbatch in place of" in text
    sent.clear()
    with fxsplit.compile(make_model().float(), ["cpu"] * 2, example_inputs=X, **options) as pipe:
        pipe.step(X, target=Y)
        assert "compressed" not in str(pipe.plan) and sent == [], "off by default"


def test_plan_prices_compressed_cuts_as_compile_does() -> None:
    options: dict[str, Any] = {"passes": FAST, "n_microbatches": 4, "example_inputs": X.double()}
    with fxsplit.compile(make_model(), ["cpu"] * 2, **options) as pipe:
        costs = pipe.costs
    slow = fxsplit.Machine.of(["cpu"] * 2, bytes_per_s=1e6)
    ways: list[Compress | None] = [None, *HOW]
    plans = {how: fxsplit.plan(costs, slow, n_microbatches=4, compress=how) for how in ways}
    for how, plan in plans.items():
        with fxsplit.compile(make_model(), slow, costs=costs, compress=how, schedule="1F1B", **options) as pipe:
            assert pipe.plan.stages == plan.stages and pipe.plan.compress == plan.compress == (how or "")
    loads = [plans[how].lower_bound_ms for how in (None, "bf16", "int8")]
    assert loads[0] > loads[1] > loads[2]
    with pytest.raises(InputError, match="compress='zip': give 'bf16' or 'int8'"):
        fxsplit.plan(costs, 2, compress="zip")  # type: ignore[arg-type]


def test_verify_proves_exact_cuts_and_measures_compressed_ones(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for how in (None, "bf16", "int8"):
        with fxsplit.compile(make_model().float(), ["cpu"] * 2, example_inputs=X, passes=FAST, compress=how) as pipe:
            found[how] = fxsplit.verify(pipe, X)
    assert all(one.equal for one in found.values()) and found[None].compression is None
    near, far = found["bf16"].compression, found["int8"].compression
    assert near is not None and far is not None
    # A bfloat16 has eight digits, and 127 steps of a row's largest element are about as many.
    assert 1e-5 < near.output < 1e-2 and 1e-5 < near.gradient < 1e-2 and near.worst >= near.gradient / 10
    assert 1e-5 < far.output < 5e-2 and far.worst_name in dict(make_model().named_parameters())
    assert str(far).startswith("cuts compressed (int8): outputs off by ")


def test_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    chain = "profile{repeats=1},cut{compress=int8},augment,order,partition,emit"
    assert cli.main(["verify", "tests.api.verify.test_approximations:make_pair", "--passes", chain]) == 0
    assert "cuts compressed (int8): outputs off by" in capsys.readouterr().out
    assert cli.main(["verify", "tests.api.verify.test_approximations:make_pair", "--passes", chain, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["compression"]
    assert told["how"] == "int8" and 0 < told["gradient"] < 0.1
    assert cli.main(["verify", "tests.api.verify.test_approximations:make_pair", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compression"] is None


def make_pair() -> Any:
    return make_model().float(), X


def test_the_planner_prices_fewer_bytes(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    costs = fxsplit.profile(Titan(width=64), torch.randint(11, (8, 5)), n_microbatches=4, device="cpu", repeats=1)
    path = str(tmp_path / "net.json")
    costs.save(path)
    found = {}
    for how in ((), ("--compress", "bf16"), ("--compress", "int8")):
        assert cli.main(["plan", path, "--devices", "2", "--bandwidth", "1e6", "--json", *how]) == 0
        found[how[-1] if how else None] = json.loads(capsys.readouterr().out)
    assert found[None]["objective"] > found["bf16"]["objective"] > found["int8"]["objective"]
    assert found["int8"]["compress"] == "int8" and found[None]["compress"] is None
    stage = found["int8"]["stages"][1]
    # Floats cross, and with them the buffer, which has no gradient.
    assert 0.25 * stage["in_bytes"] < stage["in_sent_bytes"] < 0.35 * stage["in_bytes"]
    assert stage["receive_ms"] == pytest.approx((stage["in_sent_bytes"] + stage["in_sent_gradient_bytes"]) / 1e3)


def test_bad_ways_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="compress='zip': give 'bf16' or 'int8'"):
        fxsplit.compile(make_model(), ["cpu"] * 2, compress="zip")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="compress='': give 'bf16' or 'int8'"):
        fxsplit.compile(make_model(), ["cpu"] * 2, compress="")  # type: ignore[arg-type]
    chain = "profile{repeats=1},cut{compress=bf16},augment,order,partition,emit"
    with pytest.raises(InputError, match=r"compress='int8', and a pass cut\{compress=bf16\}: state one way"):
        fxsplit.compile(make_model(), ["cpu"] * 2, example_inputs=X.double(), passes=chain, compress="int8")
    with pytest.raises(ChainError, match=r"cut\{compress=fp4\}: give bf16 or int8"):
        fxsplit.compile(make_model(), ["cpu"] * 2, passes="profile,cut{compress=fp4},augment,order,partition,emit")
    direct = FAST.replace("partition", "partition{model=direct}")
    with pytest.raises(PlanError, match="with the cost model 'direct': its stages forward no values"):
        fxsplit.compile(Mlp(), ["cpu"] * 2, example_inputs=X[:, :8], passes=direct, compress="bf16")


def test_a_profile_without_dtypes_is_refused() -> None:
    from fxsplit.planner.problem.borders import compress_cuts
    from tests.cli.test_plan import chain

    with pytest.raises(ProfileError, match=r"compress='bf16' needs: profile the model again"):
        compress_cuts(chain([1, 2]), "bf16")
    assert compress_cuts(chain([1, 2]), "").compress == ""


@dataclass(frozen=True)
class Halved:
    """Round the output of the first layer to bfloat16, and say by how much that changes numbers."""

    tolerance: ClassVar[float] = 0.01
    name: ClassVar[str] = "halved"

    def __call__(self, ir: fxsplit.IR) -> fxsplit.IR:
        """Return the IR with rounded values."""
        with ir.edited() as edit:
            node = edit.graph.find_nodes(op="call_module")[0]
            with edit.graph.inserting_after(node):
                rounded = edit.graph.call_function(round_values, ())
            node.replace_all_uses_with(rounded)
            rounded.args = (node,)
        return edit.ir


def round_values(value: Tensor) -> Tensor:
    return value.bfloat16().to(value.dtype)


def test_passes_that_state_a_tolerance_are_measured_beside_the_proof() -> None:
    """They change numbers on purpose, and so would never be equal to the model."""
    with fxsplit.compile(make_model(), 2, example_inputs=X.double(), passes=[Halved(), *fxsplit.DEFAULT]) as pipe:
        found = fxsplit.verify(pipe, X.double())
    assert found.equal and found.passes is not None and found.compression is None
    assert 1e-4 < found.passes.output < 0.01 and 1e-4 < found.passes.gradient < 0.01
    assert "passes that state a tolerance (halved): outputs off by" in str(found)
    with fxsplit.compile(make_model(), 2, example_inputs=X.double()) as pipe:
        assert fxsplit.verify(pipe, X.double()).passes is None
