"""The tests of CPU devices that run on a GPU instead, and the tests that cannot, with the reason."""

from __future__ import annotations

from pathlib import PurePosixPath

FOLDERS = ("tests/proof", "tests/runtime", "tests/passes/profile")
"""Folders with tests of the values, streams, memory and times of pipelines; other folders use no device."""

HOST = "is about processor time, threads or files of the host"
STATES = "makes stages on the CPU by itself, without compile()"
NAMES = "expects the names of CPU devices"
MADE_UP = "has a made-up accelerator in the GPU's place"
PROCESSES = "starts processes of its own, which compute on the CPU"
LATER = "the host of a GPU learns of it later, as other tests say"
LAST = "raises inside a kernel, after which the GPU does no more work for this process"
CPU_ONLY = "asks torch for something of the CPU: a generator, autocast, a scaler or an array of NumPy"
DEFAULT = "makes a tensor on the default device, which the plugin sets and no graph knows"

NOT_ON_GPU = {
    "tests/passes/profile/test_clock.py::test_a_plan_from_both_figures": MADE_UP,
    "tests/passes/profile/test_profile.py::test_a_profile_says_how_many_operators_stand_for_its_nodes": NAMES,
    "tests/passes/profile/test_profile.py::test_a_profile_says_which_accelerator_it_is_of": NAMES,
    "tests/passes/profile/test_time_alone.py": STATES,
    "tests/passes/profile/test_time_in_step.py": STATES,
    "tests/proof/test_asynchronous.py::test_a_stream_that_fails_says_where_and_leaves_parameters": NAMES,
    "tests/proof/test_default_device.py": MADE_UP,
    "tests/proof/test_everyday_loops.py": CPU_ONLY,
    "tests/proof/test_host_memory.py": MADE_UP,
    "tests/proof/test_interrupts.py": HOST,
    "tests/proof/test_memory_limit.py": PROCESSES,
    "tests/proof/test_noise.py": HOST,
    "tests/proof/test_other_loops.py": CPU_ONLY,
    "tests/proof/test_replicas.py::test_a_failing_replica_names_its_device": NAMES,
    "tests/proof/test_scripts.py::test_two_towers_are_trained_together_and_asked_alone": CPU_ONLY,
    "tests/proof/test_semantics.py::test_autocast_and_a_gradient_scaler": CPU_ONLY,
    "tests/proof/test_too_big.py::test_a_model_without_weights_becomes_the_model": DEFAULT,
    "tests/proof/test_too_big.py::test_peak_of_memory": HOST,
    "tests/proof/test_too_big.py::test_weights_are_read_stage_by_stage": NAMES,
    "tests/proof/test_too_big.py::test_what_shapes_tell_is_what_values_show": HOST,
    "tests/proof/test_ways.py::test_each_way_compiles_once_and_stays": CPU_ONLY,
    "tests/proof/test_ways.py::test_ranks_that_call_in_other_ways_are_told": PROCESSES,
    "tests/proof/test_ways.py::test_verify_takes_every_way": CPU_ONLY,
    "tests/proof/test_ways.py::test_ways_over_ranks": PROCESSES,
    "tests/proof/test_whole_files.py": HOST,
    "tests/runtime/backends/test_threads.py": STATES,
    "tests/runtime/job/test_job.py::test_a_traced_step_is_a_step": NAMES,
    "tests/runtime/job/test_status.py": HOST,
    "tests/runtime/job/test_stopwatch.py": STATES,
    "tests/runtime/loss/test_loss.py::test_a_loss_that_raises_is_named_with_its_line": LAST,
    "tests/runtime/loss/test_loss.py::test_the_parameters_of_a_loss_are_trained_once": CPU_ONLY,
    "tests/runtime/loss/test_meaning.py::test_a_loss_of_outputs_without_rows_may_be_that_of_the_whole_batch": DEFAULT,
    "tests/runtime/ranks": PROCESSES,
    "tests/runtime/stage/test_recompute.py::test_a_draw_on_a_named_device_is_the_same_in_the_second_run": CPU_ONLY,
    "tests/runtime/stage/test_recompute.py::test_autocast_holds_in_the_second_run": CPU_ONLY,
    "tests/runtime/stage/test_recompute_stage.py::test_a_write_that_counts_as_no_version_is_noticed": LATER,
    "tests/runtime/stage/test_replica.py": STATES,
    "tests/runtime/stage/test_run_split.py::test_a_failing_half_names_its_place": NAMES,
    "tests/runtime/stage/test_streams.py": STATES,
    "tests/runtime/stage/test_weight_versions.py": STATES,
    "tests/runtime/test_autograd_node.py::test_a_node_hands_gradients_to_the_backward_it_was_given": STATES,
    "tests/runtime/test_program_errors.py::test_what_the_host_can_read_is_raised_at_once": LATER,
    "tests/runtime/test_microbatches.py::test_what_is_the_same_for_all_microbatches_is_a_whole_gradient": LATER,
    "tests/runtime/test_runtime.py::test_a_failure_in_backward_names_its_stage_too": NAMES,
    "tests/runtime/test_runtime.py::test_a_failure_names_stage_microbatch_and_node_and_keeps_its_type": NAMES,
    "tests/runtime/test_runtime.py::test_workers_leave_the_callers_threads_alone": HOST,
    "tests/runtime/test_runtime_order.py": MADE_UP,
}
"""Folders, files, and tests as `file::function`, that are skipped."""


def find_reason(test: str) -> str | None:
    """Return why a test, given by its pytest name, is skipped; None if it runs."""
    file, _, rest = test.partition("::")
    function = rest.split("[")[0]
    places = (f"{file}::{function}", file, *map(str, PurePosixPath(file).parents))
    return next((NOT_ON_GPU[place] for place in places if place in NOT_ON_GPU), None)
