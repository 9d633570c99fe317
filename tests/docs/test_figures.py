"""The numbers in the sentences of pages equal the code's: a changed limit must be changed on its page too."""

from __future__ import annotations

import re

import pytest

from bench import networks
from fxsplit.api.companions import TRIED
from fxsplit.api.compiler import compiler
from fxsplit.api.compiler.microbatch_count import ROWS_EACH
from fxsplit.api.verify.verify import STEPS
from fxsplit.frontend import choose_graph
from fxsplit.frontend.watch import places
from fxsplit.ir.facts.costs.costs import UNSTEADY
from fxsplit.ir.facts.given.machine import GPU_LINK_BYTES_PER_S, MAX_DEVICES
from fxsplit.ir.facts.given.torch_devices import GPU_RESERVE
from fxsplit.planner.lattice.cuts import LEVELS
from fxsplit.planner.lattice.lattice import MOST_CELLS
from fxsplit.planner.planner import MAX_STATES
from fxsplit.runtime.ranks.hooks.buckets import BUCKET_BYTES
from fxsplit.runtime.stage import recompute
from fxsplit.schedule import RUNNABLE, SCHEDULES, Times, generate, simulate
from fxsplit.torch_internals import contents
from fxsplit.torch_internals.autograd.split import LEAST_PRODUCTS
from tests.docs.markdown import ROOT
from tests.proof.test_transparency import CASES, SLOW

WORDS = {2: "two", 3: "three", 4: "four", 16: "sixteen"}


def read(page: str) -> str:
    """Return a page as one line."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("page", "sentence", "figure"),
    [
        (
            "docs/limits.md",
            "At most {} classes of submodules are kept whole without being asked for",
            choose_graph.MOST_LEAVES,
        ),
        ("docs/limits.md", "{word} such graphs are kept", compiler.MOST_SHAPES),
        ("docs/limits.md", "{word} ways are kept", compiler.MOST_WAYS),
        ("docs/limits.md", "the last {word} programs are kept", compiler.MOST_OUTDATED),
        ("docs/limits.md", "Up to {word} earlier programs are kept", compiler.MOST_OUTDATED),
        ("docs/limits.md", "arrays up to {} MiB", contents.MOST_BYTES >> 20),
        ("docs/limits.md", "tensors in host memory up to {} KiB", contents.MOST_READ >> 10),
        ("docs/limits.md", "containers of more than {:,} items", places.MOST_ITEMS),
        ("docs/limits.md", "a buffer of over {} KiB that is first written", recompute.SMALL_BYTES >> 10),
        ("docs/limits.md", "From {} % on `compile`, `plan` and the demo say so", round(100 * UNSTEADY)),
        ("README.md", "for {} networks under all", len(networks.BUILDERS)),
        ("README.md", "under all {} synchronous schedules on 2 devices", len(RUNNABLE)),
        ("README.md", "All but the {} slowest are also checked on 3 and 4", len(SLOW)),
        ("docs/devices.md", "the bandwidth counts as {} GB/s", round(GPU_LINK_BYTES_PER_S / 1e9)),
        ("docs/devices.md", "in this process, less {} %", round(100 * GPU_RESERVE)),
        ("docs/machines.md", "`bucket_bytes=`, {} MB by default", BUCKET_BYTES // 10**6),
        ("docs/planning.md", "At most {} devices can be planned for", MAX_DEVICES),
        ("docs/planning.md", "{:,} on 512 devices", MOST_CELLS // MAX_DEVICES),
        ("docs/planning.md", "on more than {} devices the limit of a million", MOST_CELLS // MAX_STATES),
        ("docs/planning.md", "at {} levels of work", LEVELS),
        ("docs/schedules.md", "fewer than 2^{} multiplications on a CPU", LEAST_PRODUCTS["cpu"].bit_length() - 1),
        ("docs/schedules.md", "or 2^{} on a GPU", LEAST_PRODUCTS["cuda"].bit_length() - 1),
        ("docs/training.md", "of at least {word} rows if the batch is large enough", ROWS_EACH),
        ("docs/proof.md", "trains float64 copies of the pipeline and of the unsplit model for {word} steps", STEPS),
        ("docs/proof.md", "{} networks, nine synchronous schedules", len(networks.BUILDERS)),
        ("docs/proof.md", "all but the {} slowest also on 3 and 4", len(SLOW)),
    ],
)
def test_figures_of_sentences_are_those_of_the_code(page: str, sentence: str, figure: int) -> None:
    said = sentence.format(figure, word=WORDS.get(figure, str(figure)))
    assert said.lower() in read(page).lower(), f"{page} does not say: {said}"


def test_every_schedule_is_proven_on_two_devices_and_quick_networks_on_three_and_four() -> None:
    for name in networks.BUILDERS:
        on = {devices: {s for n, d, s in CASES if (n, d) == (name, devices)} for devices in (2, 3, 4)}
        assert on[2] == set(RUNNABLE) and bool(on[3]) == bool(on[4]) == (name not in SLOW)


def test_the_models_that_are_counted_are_listed() -> None:
    """README, docs/models.md and the table of bench/README.md agree with the list in bench/coverage.md."""
    found = re.findall(r"^(\d+) of (\d+) equal\.", (ROOT / "bench/coverage.md").read_text(), re.MULTILINE)
    equal, models = (sum(int(pair[i]) for pair in found) for i in (0, 1))
    assert f"Of {models} such models, compared with dropout off, {equal} train as pipelines" in read("README.md")
    assert f"lists {models} models of torchvision" in read("docs/models.md")
    assert f"{equal} of them, with dropout off, train as pipelines" in read("docs/models.md")
    rows = re.findall(
        r"^\| (?:torchvision|timm|Hugging)[^|]*\| (\d+) \| (\d+) \|",
        (ROOT / "bench/README.md").read_text(),
        re.MULTILINE,
    )
    assert [(b, a) for a, b in rows] == found


def test_the_table_of_schedules_has_the_figures_of_the_simulator() -> None:
    """Idle time and activations on 4 devices: a single figure of activations if all devices hold the same number."""
    rows = re.findall(
        r"^\| `([\w-]+)`(.*?) \|.*?\| ([\d.]+) %.*? \| ([\d., ]+) \|$",
        (ROOT / "docs/schedules.md").read_text(),
        re.MULTILINE,
    )
    assert {name for name, *_ in rows} == set(SCHEDULES)
    for name, remark, idle, activations in rows:
        schedule = generate(name, 4, 4 if "4 microbatches)" in remark else 8)
        peaks = schedule.peak_activations()
        held = ", ".join(f"{peak:g}" for peak in (set(peaks) if len(set(peaks)) == 1 else peaks))
        found = simulate(schedule, Times.unit(schedule.n_stages))
        assert (f"{100 * found.bubble:.1f}", held) == (idle, activations), name


def test_the_changelog_states_the_releases_of_other_libraries_that_compile_takes() -> None:
    """tests/api/test_companions.py reads docs/devices.md."""
    for name, ends in TRIED.items():
        first, last = (".".join(map(str, end)) for end in ends)
        assert f"{name} {first} to {last}" in read("CHANGELOG.md")
