"""Export a plan for torchtitan: the names of each stage's modules, and the schedule in torch's file format.

torchtitan copies the model for each stage and removes the modules of the other stages. The model's own forward() then
runs in every stage, and passes one tensor on. So modules must stay whole, and forward() may only call them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat

from fxsplit.errors import FileError, NotExportable
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.plan import Plan
from fxsplit.planner.problem.borders import find_module
from fxsplit.schedule import Schedule
from fxsplit.schedule.homes import go_there_and_back
from fxsplit.schedule.torch_csv import write_csv
from fxsplit.system.files import write_whole

CONFIG, SCHEDULE = "titan.py", "schedule.csv"
CODE = '''"""A pipeline that fxsplit has planned, for torchtitan."""

from pathlib import Path

MODULES = {modules}
"""The modules of each stage."""


def set_pipeline(config):
    """Set the pipeline in a torchtitan config, and return the config: for functions of a config_registry."""
    parallelism = config.parallelism
    parallelism.pipeline_parallel_degree = {devices}
    parallelism.pipeline_parallel_schedule = {style!r}
    parallelism.pipeline_parallel_schedule_csv = str(Path(__file__).with_name({schedule!r}))
    parallelism.module_fqns_per_model_part = MODULES
    if hasattr(parallelism, "num_pp_microbatches"):
        parallelism.num_pp_microbatches = {n_microbatches}
    else:  # torchtitan 0.3.0 and older: training.local_batch_size has to be {n_microbatches} times as large
        parallelism.pipeline_parallel_microbatch_size = {rows}
    return config
'''
"""torchtitan's configs are functions in Python; it no longer reads TOML."""
V_SHAPED = "ZBVZeroBubble"
"""The schedule for which torchtitan lays stages out in a V; it lays them out in loops for most others."""


@dataclass(frozen=True)
class Titan:
    """A plan for torchtitan: the modules of each stage by their names in the model, and the schedule.

    `rows` is the number of rows of a microbatch.
    """

    parts: tuple[tuple[str, ...], ...]
    schedule: Schedule
    rows: int

    @property
    def code(self) -> str:
        """A module in Python; its `set_pipeline` puts this pipeline into a config of torchtitan and returns it."""
        there_and_back = self.schedule.homes == go_there_and_back(self.schedule.n_devices)
        # torchtitan takes the actions from the file, and from the name only the layout.
        style = V_SHAPED if there_and_back else "PipelineScheduleMulti"
        return CODE.format(
            modules=pformat([list(part) for part in self.parts], width=100),
            devices=self.schedule.n_devices,
            style=style,
            schedule=SCHEDULE,
            n_microbatches=self.schedule.n_microbatches,
            rows=self.rows,
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write titan.py and schedule.csv into a folder, which is made if need be. Raises FileError if that fails."""
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"cannot make the folder {os.fspath(folder)!r}: {error}") from error
        write_csv(self.schedule, path / SCHEDULE)
        write_whole(path / CONFIG, self.code)


def check_forward(costs: Costs) -> None:
    """Raise NotExportable for a model with a forward() that computes anything besides calls of its modules."""
    odd = next((node for node in costs.nodes if not find_module(node) and not node.op.startswith("get_attr")), None)
    if odd is not None:
        raise NotExportable(
            f"node {odd.name!r} ({odd.op}) is computed by the model's own forward(), which torchtitan runs in every "
            "stage: move it into a submodule, and profile the model again"
        )


def emit_titan(plan: Plan, costs: Costs, schedule: Schedule) -> Titan:
    """Return a plan, with cuts between modules, in the form for torchtitan.

    Raises NotExportable if more than one tensor crosses a cut, and for stages that have replicas or no modules.
    """
    several = next((i for i, home in enumerate(schedule.homes) if len(home) > 1), None)
    if several is not None:
        raise NotExportable(
            f"stage {several} has {len(schedule.homes[several])} replicas, and torchtitan has a rank for each stage: "
            "take another cost model than replicated, and another schedule than Chimera"
        )
    # The names of a stage's modules, each once, in the order of their calls.
    parts = []
    for number, stage in enumerate(plan.stages):
        modules = tuple(dict.fromkeys(filter(None, (find_module(costs.by_name[name]) for name in stage.nodes))))
        if not modules:
            raise NotExportable(f"stage {number} has no module of its own: plan for fewer devices")
        parts.append(modules)
    _check_crossing(plan, costs)
    return Titan(tuple(parts), schedule, plan.rows)


def _check_crossing(plan: Plan, costs: Costs) -> None:
    """Raise NotExportable unless each stage passes one tensor to the next."""
    stage_of = plan.stage_of()
    crossing: list[list[str]] = [[] for _ in plan.stages]
    for name, _, _, readers, returned in costs.values:
        # Each stage has the model's own weights and buffers.
        if name in costs.by_name and costs.by_name[name].op.startswith("get_attr"):
            continue
        born = stage_of.get(name, 0)
        # An output of the model is passed on to the last stage.
        last = max([stage_of[reader] for reader in readers] + [len(plan.stages) - 1] * returned, default=born)
        for number in range(born, last):
            crossing[number].append(name)
    for number, names in enumerate(crossing[:-1]):
        if len(names) != 1:
            raise NotExportable(
                f"{len(names)} values cross from stage {number} to stage {number + 1} ({', '.join(names)}), and "
                "torchtitan passes on one: let each module take only the output of the module before it"
            )
