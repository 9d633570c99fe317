"""Imports that Ctrl-C does not cut in half."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fxsplit.system.imports import import_whole

PROGRAM = """
import os, signal, sys, threading
from fxsplit.system.imports import import_whole
# A shell starts its background jobs with SIGINT ignored, and Python then installs no handler for it: the program does.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    import_whole(["slow_package"])
except KeyboardInterrupt:
    import slow_package
    print("interrupted", slow_package.late.VALUE, threading.active_count())
"""


def test_an_interrupted_import_is_whole(tmp_path: Path) -> None:
    """A package with an interrupted import lost its submodules for the rest of the process."""
    package = tmp_path / "slow_package"
    package.mkdir()
    (package / "__init__.py").write_text("import slow_package.late, time\ntime.sleep(0.6)")
    (package / "late.py").write_text("VALUE = 3")
    environment = {**os.environ, "PYTHONPATH": f"{os.getcwd()}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.stdout.strip() == "interrupted 3 1", done.stderr


def test_what_is_not_there() -> None:
    assert import_whole(["no_such_module_at_all"], if_there=True) == []
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_whole(["no_such_module_at_all"])


def test_what_is_there_is_imported_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread"))
    assert import_whole(["json", "sys"]) == [sys.modules["json"], sys]
