"""pytest plugin: append a line of JSON to a file, FXSPLIT_TALLY, for each test that starts and for each outcome.

    FXSPLIT_TALLY=outcomes.jsonl python -m pytest -p bench.gpu.tally tests/...

If a session hangs or crashes, the file has the outcomes of all tests before. A session that spends too long on one test
ends itself, and prints where each of its threads is. It also ends itself after a test that breaks the GPU.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Sequence

import pytest

TEST_S = 45.0
"""Seconds that no test takes, even if many run at once: a test that takes longer hangs."""
ERRORS = os.dup(2)
"""Standard error as it is now: while a test runs, pytest has another file in its place."""
ASSERTED = "device-side assert triggered"
"""The error of a GPU that does no more work for this process: all further tests would fail with it."""
MOST = 300
"""How many characters of an error are kept."""


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note the start of a test, and begin its time limit."""
    append(nodeid, "started")
    # A thread that waits inside of C code sees no signal, but this timer's thread runs on.
    faulthandler.dump_traceback_later(TEST_S, exit=True, file=ERRORS)


def pytest_runtest_logfinish() -> None:
    """Cancel the test's time limit."""
    faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test's outcome; its setup and teardown are noted only if they fail or skip."""
    if report.when == "call" or not report.passed:
        append(report.nodeid, report.outcome, "" if report.passed else tell(report))
    if report.failed and ASSERTED in str(report.longrepr):
        os._exit(1)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be collected."""
    if report.failed:
        append(report.nodeid, "failed", tell(report))


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Note tests that are skipped."""
    for item in items:
        append(item.nodeid, "deselected")


def pytest_sessionfinish() -> None:
    """Note that all tests were run: the exit code of a process that ends itself may be the code of failing tests."""
    append("", "ended")


def tell(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the error of a report, cut to MOST characters."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:MOST]
    crash = getattr(report.longrepr, "reprcrash", None)
    # The error of an import comes at the end, after all the lines of the traceback.
    return str(crash.message)[:MOST] if crash else str(report.longrepr)[-MOST:]


def append(test: str, outcome: str, why: str = "") -> None:
    """Append a line to the file, if one is given."""
    if path := os.environ.get("FXSPLIT_TALLY"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "why": why}) + "\n")
