"""The picture of a plan: its graph with stages and cuts, the load of each stage, and its memory with its limit."""

from __future__ import annotations

from math import inf

from fxsplit.errors import ScheduleError
from fxsplit.ir.facts.plan import Plan
from fxsplit.report.drawing.scene import LARGE, Label, Scene
from fxsplit.report.pictures.bars import draw_loads, draw_memory
from fxsplit.report.pictures.graph import draw_graph
from fxsplit.schedule.of_plan import read_times, restore_schedule
from fxsplit.schedule.simulation.simulate import Simulation, simulate
from fxsplit.schedule.simulation.timeline import Timeline
from fxsplit.system.figures import format_count, format_ms, format_share

HEAD, SPACE, MARGIN = 58.0, 14.0, 12.0


def draw_plan(plan: Plan) -> Scene:
    """Return the picture of a plan, with its graph if the plan knows the costs that it was made from."""
    graph, loads, memory = draw_graph(plan, plan.costs), draw_loads(plan), draw_memory(plan, find_limits(plan))
    head, below = title_plan(plan)
    scene = Scene("plan", f"{head}. {below}", 0.0, 0.0)
    scene.add(Label(MARGIN, 24, head, "ink", LARGE, bold=True), Label(MARGIN, 44, below, "ink"))
    scene.place(graph, 0.0, HEAD)
    # Side by side under a wide graph, one below the other under a narrow one.
    top = HEAD + graph.height + SPACE
    beside = graph.width >= loads.width + memory.width
    scene.place(loads, 0.0, top)
    scene.place(memory, loads.width if beside else 0.0, top if beside else top + loads.height + SPACE)
    scene.width = max(scene.width, 640.0)
    return scene


def title_plan(plan: Plan) -> tuple[str, str]:
    """Return two lines about a plan: stages, devices and schedule; slowest stage, step and bubble."""
    devices = len({d for stage in plan.stages for d in stage.devices})
    simulation = simulate_plan(plan)
    devices = devices if simulation is None else simulation.schedule.n_devices
    head = (
        f"{format_count(len(plan.stages), 'stage')} on {format_count(devices, 'device')}, {plan.schedule}, "
        f"{format_count(plan.n_microbatches, 'microbatch')}"
    )
    of_step = plan.minimised == "step"
    figures = [f"slowest stage {format_ms(plan.bottleneck_ms)} for a microbatch" + f", {plan.standing}" * (not of_step)]
    if simulation is not None:
        figures.append(f"step {format_ms(simulation.step_ms)}" + f", {plan.standing}" * of_step)
        figures.append(f"bubble (idle time of devices) {format_share(simulation.bubble)}")
    figures += [str(plan.estimated)] if plan.estimated else []
    return head, "; ".join(figures)


def simulate_plan(plan: Plan) -> Simulation | None:
    """Return the simulated step of a plan; None if its schedule cannot be restored."""
    try:
        schedule = restore_schedule(plan)
        return simulate(schedule, read_times(plan, schedule))
    except ScheduleError:
        # Such as a plan that was made by hand, for another number of stages.
        return None


def find_limits(plan: Plan) -> list[float]:
    """Return the memory limit of each stage's devices in bytes; infinite if it is unlimited or not known."""
    if plan.machine is None:
        return [inf] * len(plan.stages)
    return [stage.find_limit(plan.machine) for stage in plan.stages]


def find_device_limits(plan: Plan, timeline: Timeline) -> list[float]:
    """Return the memory limit of each device of a timeline, in bytes; empty if the plan does not know its machine."""
    devices = plan.machine.rolled().devices if plan.machine is not None else ()
    return [d.memory_bytes for d in devices] if len(devices) == len(timeline.devices) else []
