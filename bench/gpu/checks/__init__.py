"""The checks, in the order in which they run: a check comes before the checks that rely on it."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Sequence

from bench.gpu.checks import backends, equality, memory, numbers, order, placement
from bench.gpu.setting import Setting

Check = Callable[[Setting], tuple[bool, str]]
"""A check returns whether it holds, and a line about its findings."""

# The first checks explain why later checks fail: with a wrong stream nothing else can be right.
ALL: tuple[Check, ...] = (
    order.backward_runs_on_the_stream_of_its_forward,
    equality.schedules_equal_the_unsplit_model,
    numbers.masks_are_the_same_however_the_model_is_cut,
    equality.call_and_backward,
    order.inputs_made_on_a_side_stream,
    order.a_trace_has_every_action,
    placement.a_number_of_devices_is_the_gpu,
    placement.stages_on_the_cpu_and_on_the_gpu,
    placement.inputs_and_targets_in_host_memory,
    placement.gradient_of_an_input_in_host_memory,
    equality.autocast_holds_in_workers,
    numbers.masks_without_tensor_arguments,
    order.a_step_does_not_wait,
    memory.failed_steps_keep_no_memory,
    placement.pinned_input_overwritten_after_the_call,
    memory.recurrent_weights_stay_flat,
    numbers.profiling_leaves_the_generator,
    memory.peak_beside_the_plan,
    backends.inductor,
    backends.cudagraphs,
)


def run_checks(setting: Setting, checks: Sequence[Check] = ALL) -> int:
    """Run checks one after another and note each; return how many failed."""
    begin, failed = time.monotonic(), 0
    for check in checks:
        holds, text = run_check(setting, check)
        failed += not holds
        verdict = "ok" if holds else "FAIL"
        setting.note("checks", verdict=verdict, check=check.__name__, seconds=time.monotonic() - begin, found=text)
    return failed


def run_check(setting: Setting, check: Check) -> tuple[bool, str]:
    """Run one check; an error makes it fail, and its warnings become part of its text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            holds, text = check(setting)
        except Exception as error:  # the following checks must run too
            traceback.print_exc(limit=-4)
            holds, text = False, f"{type(error).__name__}: {str(error)[:300]}"
    # The memory of one check must not count in the next one.
    setting.release_memory()
    # A warning that comes in each step is reported once.
    told = sorted({str(w.message).splitlines()[0][:110] for w in caught})
    return holds, text + (f" | warnings: {told[:3]}" if told else "")
