"""The ten questions that a reader has about a plan, and their answers in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from fxsplit.ir.facts.costs.text import sum_by_module
from fxsplit.ir.facts.plan import PROVEN, Plan
from fxsplit.report.graph.cuts import Cut, list_cuts
from fxsplit.report.graph.fold import fold_nodes
from fxsplit.report.page.story import Story, Trial
from fxsplit.report.pictures.bars import split_load
from fxsplit.report.pictures.plan import find_limits
from fxsplit.schedule.simulation.idle import CAUSES, Cause, Idle, explain_idle, sum_causes
from fxsplit.schedule.simulation.memory import find_peak
from fxsplit.system.figures import format_bytes, format_count, format_ms, format_share


@dataclass(frozen=True)
class Answer:
    """A question with its answer in sentences, and the section of the page with the figures."""

    question: str
    sentences: tuple[str, ...]
    section: str


def answer_all(story: Story) -> list[Answer]:
    """Return the ten questions, with their answers."""
    asked: list[tuple[str, Callable[[Story], list[str]], str]] = [
        ("What is the model cut into?", _say_stages, "graph"),
        ("Which stage is the slowest, and why?", _say_slowest, "stages"),
        ("Why is each cut here, and not at the next place?", _say_cuts, "cuts"),
        ("How far is this plan from the best possible one?", _say_gap, "stages"),
        ("How long does a training step take?", _say_step, "timeline"),
        ("Where is idle time, and what is its cause?", _say_idle, "timeline"),
        ("Does it fit in memory, and what fills it?", _say_memory, "memory"),
        ("What would other hardware or microbatches bring?", _say_trials, "what-if"),
        ("Which layer should become faster first?", _say_layers, "what-if"),
        ("How can I make this plan again?", _say_commands, "again"),
    ]
    if story.plan.schedule == "Inference":
        asked[4] = ("How long does a batch take?", _say_step, "timeline")
    return [Answer(question, tuple(say(story)), section) for question, say, section in asked]


def name_stage(plan: Plan, number: int) -> str:
    """Return a stage with its device for people, such as `stage 1 (cuda:1)`."""
    return f"stage {number} ({'+'.join(plan.device_names[d] for d in plan.stages[number].devices)})"


def _say_stages(story: Story) -> list[str]:
    plan = story.plan
    model = story.model or "The model"
    count = format_count(len(plan.stages), "stage")
    several = any(len(stage.devices) > 1 for stage in plan.stages)
    where = "devices of its own, which share its microbatches" if several else "its own device"
    kind = f"pieces that run one after another, each on {where}"
    found = [f"{model} is cut into {count}: {kind}."]
    for number, stage in enumerate(plan.stages[:MOST_LISTED]):
        runs = f"runs {stage.place.replace(' .. ', ' to ')}" if stage.nodes else "only passes values on"
        share = ""
        if plan.costs is not None and plan.costs.compute_ms:
            own = sum(plan.costs.by_name[n].forward_ms + plan.costs.by_name[n].backward_ms for n in stage.nodes)
            share = f", {format_share(own / plan.costs.compute_ms)} of the computing"
        nodes = format_count(len(stage.nodes), "node")
        found.append(f"{_begin(name_stage(plan, number))} {runs}: {nodes} of the graph{share}.")
    if len(plan.stages) > MOST_LISTED:
        found.append(f"The table of times lists the other {len(plan.stages) - MOST_LISTED} too.")
    return found


MOST_LISTED = 4
"""How many stages or cuts an answer lists."""


def _say_slowest(story: Story) -> list[str]:
    plan = story.plan
    number, stage = max(enumerate(plan.stages), key=lambda pair: (pair[1].load_ms, -pair[0]))
    rows = f" of {format_count(plan.rows, 'row')}" if plan.rows else ""
    found = [
        f"{_begin(name_stage(plan, number))}: it is busy for {format_ms(stage.load_ms)} with each microbatch{rows}. "
        "A pipeline cannot be faster than its slowest stage."
    ]
    parts = split_load(stage, plan)
    total = sum(parts.values()) or 1.0
    shares = ", ".join(f"{name} {format_ms(ms)} ({format_share(ms / total)})" for name, ms in parts.items())
    found.append(f"Its time is {shares}.")
    if stage.launch_ms >= stage.load_ms > 0:
        found.append(f"Its host decides: launching the work takes {format_ms(stage.launch_ms)}.")
    if plan.costs is not None:
        boxes = fold_nodes(number, [plan.costs.by_name[name] for name in stage.nodes], N_PARTS)
        largest = max(boxes, key=lambda box: box.ms, default=None)
        own = sum(box.ms for box in boxes)
        if largest is not None and own:
            share = f"{format_ms(largest.ms)} ({format_share(largest.ms / own)})"
            found.append(f"The largest part of its computing is {largest.name}: {share}.")
    others = [s.load_ms for i, s in enumerate(plan.stages) if i != number]
    if others:
        even = sum(s.load_ms for s in plan.stages) / len(plan.stages)
        low, high = format_ms(min(others)), format_ms(max(others))
        some = f"The other {'stage takes' if len(others) == 1 else 'stages take'}"
        found.append(f"{some} {low}." if low == high else f"{some} {low} to {high}.")
        found.append(f"If all stages were equal, each would take {format_ms(even)}.")
    return found


N_PARTS = 12
"""How many parts a stage is divided into to find the largest."""


def _say_cuts(story: Story) -> list[str]:
    plan = story.plan
    cuts = list_cuts(plan, plan.costs)
    if not cuts:
        return ["There is no cut: one stage has the whole model."]
    aim = "the step becomes shortest" if plan.minimised == "step" else "the slowest stage becomes fastest"
    why = "work is shared, and few bytes cross" if any(cut.transfer_ms for cut in cuts) else TIME_ONLY
    found = [f"The cuts together are those with which {aim}: {why}."]
    for cut in cuts[:MOST_LISTED]:
        found.append(f"{describe_cut(cut)} {describe_shifts(story, cut.number)}{describe_next_best(story, cut.number)}")
    if len(cuts) > MOST_LISTED:
        found.append(f"The table of cuts lists the other {len(cuts) - MOST_LISTED} too.")
    return found


TIME_ONLY = "only the times of the stages count, since no link has a rate and transfers count as free"


def describe_cut(cut: Cut) -> str:
    """Return a sentence about the values that cross a cut."""
    # Numbers, such as the size of a tensor, cross cuts too, and have no bytes.
    values = [value for value in cut.values if value.both_bytes]
    names = ", ".join(value.name for value in values[:2])
    rest = f" and {len(values) - 2} more" if len(values) > 2 else ""
    of = f" ({names}{rest})" if names else ""
    time = f", {format_ms(cut.transfer_ms)} of transfer" if cut.transfer_ms else ", and transfers count as free"
    there, back = format_bytes(cut.forward_bytes), format_bytes(cut.backward_bytes)
    return (
        f"Cut {cut.number}, between stages {cut.number - 1} and {cut.number}: for each microbatch {there} go "
        f"forward{of} and {back} of gradients come back{time}."
    )


def describe_shifts(story: Story, number: int) -> str:
    """Return a sentence on the places next to a cut, with a space after it; "" if they are not known."""
    known = next((best for best in story.next_best if best.number == number), None)
    shifts = {} if known is None else {"earlier": known.earlier_ms, "later": known.later_ms}
    said = [f"{format_ms(ms)} with the cut one operation {where}" for where, ms in shifts.items() if ms is not None]
    here = format_ms(story.plan.bottleneck_ms)
    return f"The slowest stage takes {here} with the cut here, and {' or '.join(said)}. " if said else ""


def describe_next_best(story: Story, number: int) -> str:
    """Return a sentence on the best plan without a cut; why it is not known if it is not."""
    known = next((best for best in story.next_best if best.number == number), None)
    if known is None:
        return "The best plan with no cut at this place was not searched." if story.plan.costs else ""
    if known.bottleneck_ms is None:
        return "With no cut at this place there is no plan."
    more = known.bottleneck_ms / story.plan.bottleneck_ms - 1.0 if story.plan.bottleneck_ms else 0.0
    if abs(more) < PROVEN:
        return "Another place is as good: the best plan with no cut here has an equally fast slowest stage."
    ms = format_ms(known.bottleneck_ms)
    if more < 0:
        return f"The best plan with no cut here has a slowest stage of {ms}, {format_share(-more)} less."
    return f"With no cut here, the slowest stage of the best other plan takes {ms}, {format_share(more)} more."


def _say_gap(story: Story) -> list[str]:
    plan = story.plan
    if plan.standing == "not proven" or not isfinite(plan.gap):
        return ["That is not known: no lower bound was proven for this plan. The planner proves one: fxsplit plan."]
    by_step = plan.minimised == "step" and plan.step_ms is not None and plan.step_lower_bound_ms is not None
    what = "plan has a shorter step" if by_step else "split has a faster slowest stage"
    if plan.optimal:
        found = [f"No other {what}: that is proven{_count_ways(plan)}."]
    else:
        low, own = plan.lower_bound_ms, plan.bottleneck_ms
        if by_step:
            low, own = plan.step_lower_bound_ms or 0.0, plan.step_ms or 0.0
        share = format_share(own / low - 1.0 if low else inf)
        least = "step is below" if by_step else "slowest stage is below"
        found = [
            f"At most {share}: no {least} {format_ms(low)}{_count_ways(plan)}, and this one takes {format_ms(own)}."
        ]
    if not by_step and story.simulation is not None and len(plan.stages) > 1:
        count, step = plan.n_microbatches, format_ms(story.simulation.step_ms)
        found.append(
            f"That says nothing of the whole step, which also fills and empties the pipeline: {count} microbatches "
            f"keep the slowest stage busy for {format_ms(count * plan.bottleneck_ms)} of {step}."
        )
    how = f"measured by itself{f', on {plan.measured_on}' if plan.measured_on else ''}"
    if plan.estimated:
        how = f"estimated: {plan.estimated.details}. For the true times another plan may be better"
    found.append(f"The proof takes the time of each operation as it was {how}.")
    return found


def _count_ways(plan: Plan) -> str:
    """Return from how many places for cuts the planner has chosen, in words; "" if it is not known."""
    places = plan.n_states - 2  # one state has no node, and one has all
    return f" among all plans with cuts at {places:,} places" if places > 0 else ""


def _say_step(story: Story) -> list[str]:
    plan, found = story.plan, []
    what = "batch" if plan.schedule == "Inference" else "step"
    if story.simulation is None:
        found.append(f"The {what} was not simulated: the schedule {plan.schedule} does not run these stages.")
    else:
        ms = story.simulation.step_ms
        batch = f"{format_count(plan.n_microbatches, 'microbatch')} of {format_count(plan.rows, 'row')}"
        found.append(f"Predicted: {format_ms(ms)} for a batch of {batch}, in the order of work called {plan.schedule}.")
        alone = plan.n_microbatches * plan.single_ms
        if alone and ms:
            found.append(
                f"One device alone would take {format_ms(alone)}, as predicted in the same way: the pipeline would be "
                f"{alone / ms:.2f} times as fast. One device was not measured."
            )
    if story.measured is None:
        found.append("Measured: not here. In Python, pipe.report(path, x, target=y) runs a step and shows it too.")
    else:
        ms, predicted = story.measured.length_ms, 0.0 if story.simulation is None else story.simulation.step_ms
        compared = f", {describe_change(ms / predicted - 1.0)} than predicted" if predicted else ""
        found.append(f"Measured: {format_ms(ms)}{compared}.")
        if predicted and abs(ms / predicted - 1.0) > NEAR:
            found += _explain_difference(story)
    return found


NEAR = 0.05
"""Up to this share of difference, a measured step is as predicted, and the page explains nothing."""


def _explain_difference(story: Story) -> list[str]:
    """Return what the measured step shows about its difference from the predicted one."""
    simulation, measured, found = story.simulation, story.measured, []
    if simulation is None or measured is None:
        return []
    alone = story.plan.n_microbatches * story.plan.single_ms
    if alone and measured.length_ms > alone:
        found.append(
            f"That is longer than the {format_ms(alone)} predicted for one device: measured here, the pipeline does "
            "not pay."
        )
    devices = len(measured.devices)
    before = simulation.step_ms * devices * (1.0 - simulation.bubble)
    now = measured.length_ms * devices * (1.0 - measured.bubble)
    if before:
        found.append(
            f"Computing took {now / before:.2f} times as long as in the profile, where each operation ran by itself, "
            f"and devices were idle for {format_share(measured.bubble)} (predicted: {format_share(simulation.bubble)})."
        )
    if now > SLOWER * before:
        found.append(
            "Usual reasons: devices that share cores or a GPU, a busy machine, or a first step that still warms up."
        )
    return found


SLOWER = 1.2
"""From this factor on, a measured step is so much longer than the predicted one that the page gives reasons."""


def describe_change(more: float) -> str:
    """Return a relative difference in words: `3.1 % more`, or `2.0 % less`."""
    return f"{format_share(abs(more))} {'more' if more >= 0 else 'less'}"


def _say_idle(story: Story) -> list[str]:
    simulation = story.simulation
    if simulation is None or story.predicted is None:
        return ["That is not known, since the step was not simulated."]
    found = [f"Devices are idle for {format_share(simulation.bubble)} of the predicted step (the bubble)."]
    step_ms = simulation.step_ms or 1.0
    names = story.predicted.devices
    idle = explain_idle(simulation)
    by_device = sorted(range(len(idle)), key=lambda d: (-simulation.bubbles[d], d))
    for device in by_device[:MOST_LISTED]:
        causes = sorted(sum_causes(idle[device]).items(), key=lambda pair: -pair[1])
        if not causes:
            found.append(f"{names[device]} is never idle.")
            continue
        shares = [f"{format_share(ms / step_ms)} {_name_cause(cause, idle[device])}" for cause, ms in causes]
        why = "; ".join(shares) if len(shares) > 1 else _name_cause(causes[0][0], idle[device])
        found.append(f"{names[device]} is idle for {format_share(simulation.bubbles[device])} of the step: {why}.")
    if len(by_device) > MOST_LISTED:
        found.append(f"The table of idle time lists the other {len(by_device) - MOST_LISTED} too.")
    if story.measured is not None:
        share = format_share(story.measured.bubble)
        found.append(f"In the measured step devices are idle for {share}. Its causes were not measured.")
    return found


def _name_cause(cause: Cause, idle: Sequence[Idle]) -> str:
    """Return a cause in words, with the stage that a device waits for the longest."""
    waits: dict[tuple[int, bool], float] = {}
    for time in idle:
        if time.cause == cause and time.stage is not None and time.action is not None:
            key = time.stage, time.stage > time.action.stage
            waits[key] = waits.get(key, 0.0) + time.end_ms - time.begin_ms
    longest = max(waits, key=lambda key: (waits[key], -key[0]), default=None)
    if longest is None or cause == "launch":
        return f"because {CAUSES[cause]}"
    stage, later = longest
    what = f"{'gradients' if later else 'values'} of stage {stage}"
    return f"waiting until {what} are computed" if cause == "stage" else f"waiting for {what}, which are on their way"


def _say_memory(story: Story) -> list[str]:
    plan, limits = story.plan, find_limits(story.plan)
    found = []
    fullest = max(range(len(plan.stages)), key=lambda i: (plan.stages[i].memory_bytes / limits[i] if limits[i] < inf
                                                          else 0.0, plan.stages[i].memory_bytes, -i))  # fmt: skip
    over = [i for i, stage in enumerate(plan.stages) if stage.memory_bytes > limits[i]]
    if over:
        found.append(f"No: {name_stage(plan, over[0])} needs more than its device has.")
    elif min(limits, default=inf) < inf:
        found.append(f"Yes. The fullest is {name_stage(plan, fullest)}.")
    else:
        found.append(
            f"That cannot be said, since the memory of the devices is not known. The fullest is "
            f"{name_stage(plan, fullest)}."
        )
    stage = plan.stages[fullest]
    of = f" of {format_bytes(limits[fullest])} ({format_share(stage.memory_bytes / limits[fullest])})"
    found.append(f"It needs at most {format_bytes(stage.memory_bytes)}{of if limits[fullest] < inf else ''} at once.")
    total = stage.memory_bytes or 1.0
    kinds = sorted(stage.memory_kinds.items(), key=lambda pair: -pair[1])
    parts = ", ".join(
        f"{kind} {format_bytes(size)} ({format_share(size / total)})" for kind, size in kinds if size > LEAST * total
    )
    found.append(f"It is filled by {parts}.")
    if kinds and kinds[0][0] == "activations":
        found.append(
            'Activations are what the backward needs again. With recompute="always", compile() computes them again '
            "instead of keeping them, which takes time (see What if)."
        )
    if story.predicted is not None and story.predicted.memory:
        peaks = ", ".join(
            f"{name} {format_bytes(find_peak(trace))}"
            for name, trace in zip(story.predicted.devices, story.predicted.memory, strict=False)
        )
        found.append(f"At most in the predicted step: {peaks}.")
    return found


LEAST = 0.001
"""A kind of memory with a smaller share of its stage's memory is not named."""


def compare_trial(trial: Trial, base: Trial | None) -> str:
    """Return the result of a trial in words: its step, and the change from the present plan."""
    if trial.step_ms is None:
        return f"no plan ({trial.note})"
    if base is None or not base.step_ms:
        return f"step {format_ms(trial.step_ms)}"
    more = trial.step_ms / base.step_ms - 1.0
    if abs(more) < 5e-4:
        return f"step {format_ms(trial.step_ms)}, no change"
    return f"step {format_ms(trial.step_ms)}, {format_share(abs(more))} {'longer' if more > 0 else 'shorter'}"


def find_base(story: Story) -> Trial | None:
    """Return the trial without a change, to compare with."""
    return next((t for t in story.list_trials("what if") if t.change == "nothing changed"), None)


ASKED = {
    "one more device": "one more device",
    "twice the bandwidth": "twice the bandwidth",
    "half the microbatch": "half the microbatch (twice as many, of half the rows)",
}
"""The changes that the answer names, in its words; the table has all changes."""


def _say_trials(story: Story) -> list[str]:
    tried, base = {t.change: t for t in story.list_trials("what if")}, find_base(story)
    if base is None:
        return [f"That was not tried: {story.trials_left_out or 'nothing was planned'}. Give the profile: --profile."]
    found = [f"All of these are predictions, to be compared with {format_ms(base.step_ms or 0.0)} now."]
    for change, shown in ASKED.items():
        if change in tried:
            halves = ", if half the rows take half the time" * (change == "half the microbatch")
            found.append(f"{_begin(shown)}: {compare_trial(tried[change], base)}{halves}.")
        elif change == "twice the bandwidth":
            one = len(story.plan.stages) == 1
            free = "there is no cut" if one else "no link has a rate in this plan, and transfers count as free"
            found.append(f"Twice the bandwidth: nothing, since {free}.")
        else:
            found.append(f"{_begin(change)}: not tried, {story.trials_left_out or 'it does not apply'}.")
    better = [t for t in tried.values() if t.step_ms and base.step_ms and not _is_short(t)]
    best = min(better, key=lambda t: t.step_ms or inf, default=None)
    if best is not None and best.change not in (*ASKED, "nothing changed"):
        found.append(f"The best of all that was tried is {best.change}: {compare_trial(best, base)}.")
    return found


def _is_short(trial: Trial) -> bool:
    """Return whether a trial needs more memory than there is."""
    return trial.note.startswith("needs more memory")


def _say_layers(story: Story) -> list[str]:
    trials, base = [t for t in story.list_trials("layer") if t.step_ms is not None], find_base(story)
    if not trials or base is None:
        if story.plan.costs is None:
            return ["That is not known without the profile: give it with --profile."]
        largest = next(iter(sum_by_module(story.plan.costs.nodes, 1)), "none")
        return [f"Probably {largest}, which takes most time; plans with a faster layer were not tried."]
    best = min(trials, key=lambda t: t.step_ms or inf)
    found = [
        f"{best.change} ({best.note}): if it were twice as fast, and the model were cut again, a step would take "
        f"{format_ms(best.step_ms or 0.0)} ({compare_trial(best, base).partition(', ')[2]})."
    ]
    rest = [f"{t.change}: {compare_trial(t, base)}" for t in trials if t is not best]
    if rest:
        found.append(f"For comparison, each twice as fast: {'; '.join(rest)}.")
    return found


SAVE = (
    "Save plan.json with the button in the section Make it again, and compile your model with it: "
    'fxsplit.compile(model, devices, plan="plan.json").'
)


def _say_commands(story: Story) -> list[str]:
    more = "The commands in that section also save the profile, and make the plan and this page from it."
    return [SAVE, more] if story.commands else [SAVE]


def _begin(text: str) -> str:
    """Return a text with a capital letter, to begin a sentence."""
    return text[:1].upper() + text[1:]
