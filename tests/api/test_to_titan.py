"""An export for torchtitan runs in its loop with the pipeline's gradients; an impossible export is refused."""

from __future__ import annotations

import copy
import runpy
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn import functional as F

import fxsplit
from fxsplit.api.to_titan import Titan as Emitted
from fxsplit.api.to_titan import check_forward, emit_titan
from fxsplit.api.to_torch import LEAST_TORCH
from fxsplit.cli import main as cli
from fxsplit.errors import FileError, NotExportable
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.schedule import generate
from tests.support.models import Mlp, Residual
from tests.support.ranks import ranks
from tests.support.titan_model import Titan

CHAIN = "profile{repeats=1},cut{at=modules},augment,order,partition,emit"


def make_batch() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(5)
    return Titan().double(), torch.randint(11, (8, 5)), torch.randint(11, (8, 5))


def loss_of(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten())


def take_apart(model: nn.Module, kept: list[str]) -> nn.Module:
    """Return a copy of a model with only these parts, as torchtitan makes it."""
    made = copy.deepcopy(model)
    for name, child in list(made.named_children()):
        if isinstance(child, nn.ModuleDict):
            for key in [key for key in child if f"{name}.{key}" not in kept]:
                del child[key]
        elif name not in kept:
            setattr(made, name, None)
    return made


def set_pipeline(folder: str | Path, **fields: int) -> SimpleNamespace:
    """Return the fields that the exported file sets in a config that has these fields."""
    parallelism = SimpleNamespace(**fields)
    config = SimpleNamespace(parallelism=parallelism)
    set_in = runpy.run_path(str(Path(folder, "titan.py")))["set_pipeline"]
    assert set_in(config) is config
    return parallelism


def run_as_titan(rank: int, n: int, folder: str) -> dict[str, Tensor]:
    """Return the gradients of this rank's parts after a step by torch's runtime, by their names in the model."""
    options = vars(set_pipeline(folder, num_pp_microbatches=1))
    model, x, target = make_batch()
    parts, count = options["module_fqns_per_model_part"], options["num_pp_microbatches"]
    shares = len(parts) // n
    own = [rank, len(parts) - 1 - rank] if options["pipeline_parallel_schedule"] == "ZBVZeroBubble" else [
        rank + s * n for s in range(shares)
    ]  # fmt: skip
    stages = [PipelineStage(take_apart(model, parts[i]), i, len(parts), torch.device("cpu")) for i in own]
    runtime = _PipelineScheduleRuntime(
        stages, count, loss_fn=lambda outputs, target: loss_of(outputs, target) / count, scale_grads=False
    )
    runtime._load_csv(options["pipeline_parallel_schedule_csv"])
    runtime.step(*((x,) if 0 in own else ()), target=target if len(parts) - 1 in own else None, return_outputs=False)
    dist.barrier()
    return {k: p.grad for stage in stages for k, p in stage.submod.named_parameters() if p.grad is not None}


def emit(folder: Path, schedule: str = "1F1B") -> Emitted:
    """Export a plan of a transformer over two stages and four microbatches of two rows for torchtitan."""
    plan, costs = plan_of(Titan(), torch.randint(11, (8, 5)), {"layers.1": 0, "layers.2": 1})
    made = emit_titan(plan, costs, generate(schedule, 2, 4))
    made.save(folder)
    return made


def test_the_count_of_microbatches_has_the_name_that_the_config_has(tmp_path: Path) -> None:
    """torchtitan renamed it in August 2026, and refuses the other name."""
    made = emit(tmp_path)
    common = {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "PipelineScheduleMulti",
        "pipeline_parallel_schedule_csv": str(tmp_path / "schedule.csv"),
        "module_fqns_per_model_part": [list(part) for part in made.parts],
    }
    assert vars(set_pipeline(tmp_path, num_pp_microbatches=1)) == common | {"num_pp_microbatches": 4}
    older = set_pipeline(tmp_path, pipeline_parallel_microbatch_size=1)
    assert vars(older) == common | {"pipeline_parallel_microbatch_size": 2}


def test_torchtitans_own_parser_takes_what_is_emitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs only if torchtitan is installed; its parser also needs tyro, and no other dependency."""
    pytest.importorskip("tyro", reason="torchtitan's parser needs tyro")
    config = pytest.importorskip("torchtitan.config", reason="torchtitan is not installed")
    made = emit(tmp_path)
    registry: Any = ModuleType("fxsplit_titan_registry")
    set_in = runpy.run_path(str(tmp_path / "titan.py"))["set_pipeline"]

    @dataclass
    class Config:
        parallelism: Any = field(default_factory=config.ParallelismConfig)
        hf_assets_path: str = str(tmp_path)

    Config.__annotations__["parallelism"] = config.ParallelismConfig
    registry.planned = lambda: set_in(Config())
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    arguments = ["--module", registry.__name__, "--config", "planned", "--parallelism.pipeline_parallel_degree", "2"]
    parsed = config.ConfigManager().parse_args(arguments).parallelism
    assert parsed.module_fqns_per_model_part == [list(part) for part in made.parts]
    assert Path(parsed.pipeline_parallel_schedule_csv).is_file()
    counts = getattr(parsed, "num_pp_microbatches", None), getattr(parsed, "pipeline_parallel_microbatch_size", None)
    assert counts in ((4, None), (None, 2))


@pytest.mark.skipif(torch.__version__ < LEAST_TORCH, reason="torch's own runtime fails, and is refused")
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble", "V-Half", "DualPipeV"])
def test_torchtitans_loop_gives_the_pipelines_gradients(schedule: str, tmp_path: Path) -> None:
    model, x, target = make_batch()
    options: dict[str, Any] = {"n_microbatches": 4, "schedule": schedule, "loss_fn": loss_of, "passes": CHAIN}
    pipe = fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, **options)
    pipe.step(x, target=target)
    pipe.costs.save(tmp_path / "net.json")
    arguments = ["--devices", "2", "--schedule", schedule, "--n-microbatches", "4", "--emit", "titan"]
    assert cli.main(["plan", str(tmp_path / "net.json"), *arguments, "--to", str(tmp_path / "out")]) == 0
    found: dict[str, Tensor] = {}
    for part in ranks(2, run_as_titan, str(tmp_path / "out")):
        found |= part
    assert set(found) == set(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-15)
    pipe.close()


def plan_of(model: nn.Module, x: Tensor, pins: dict[str, int] | None = None) -> tuple[Any, Costs]:
    costs = fxsplit.profile(model, x, n_microbatches=4, device="cpu", repeats=1)
    return fxsplit.plan(costs, 2, pins=pins), costs


class Skipping(Titan):
    """A block also reads the output of the embedding."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.embed(x)
        h = first
        for layer in self.layers.values():
            h = layer(h, first)
        result: Tensor = self.output(self.norm(h))
        return result


def test_what_torchtitan_cannot_cut_is_refused_by_name(tmp_path: Path) -> None:
    _, costs = plan_of(Mlp(4), torch.randn(8, 8))
    with pytest.raises(NotExportable, match=r"node 'relu' \(call_function:relu\) is computed by the model's own"):
        check_forward(costs)
    plan, costs = plan_of(Skipping(), torch.randint(11, (8, 5)), {"layers.1": 0, "layers.2": 1})
    check_forward(costs)
    with pytest.raises(NotExportable, match=r"2 values cross from stage 0 to stage 1 \(embed, add_1\)"):
        emit_titan(plan, costs, generate("1F1B", 2, 4))
    plan, costs = plan_of(Titan(), torch.randint(11, (8, 5)), {"layers.1": 0, "layers.2": 1})
    with pytest.raises(NotExportable, match="stage 0 has 2 replicas"):
        emit_titan(plan, costs, generate("Chimera", 2, 4))
    empty = replace(plan, stages=(replace(plan.stages[0], nodes=()), *plan.stages[1:]))
    with pytest.raises(NotExportable, match="stage 0 has no module of its own"):
        emit_titan(empty, costs, generate("1F1B", 2, 4))
    made = emit_titan(plan, costs, generate("1F1B", 2, 4))
    assert isinstance(made, Emitted)
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot make the folder"):
        made.save(tmp_path / "file" / "inside")


def test_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "net.json")
    plan_of(Residual(), torch.randn(8, 3, 4, 4))[1].save(path)
    assert cli.main(["plan", path, "--emit", "titan"]) == 2
    assert "is computed by the model's own forward()" in capsys.readouterr().err
    plan_of(Titan(), torch.randint(11, (8, 5)))[1].save(path)
    for arguments, message in (
        (["--devices", "9", "--emit", "titan"], "too few for 9 stages"),
        (["--devices", "1..3", "--emit", "titan"], "--emit writes one plan"),
        (["--to", "somewhere"], "it needs --emit"),
    ):
        assert cli.main(["plan", path, *arguments]) in (2, 3)
        assert message in capsys.readouterr().err
    assert cli.main(["plan", path, "--emit", "titan", "--to", str(tmp_path / "new"), "--json"]) == 0
    assert '"parts"' in capsys.readouterr().out
    assert cli.main(["plan", path, "--devices", "3", "--cut-at", "modules"]) == 0
