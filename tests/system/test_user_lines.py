"""Warnings point to the user's own lines, not to files of torch, fxsplit or Python."""

from __future__ import annotations

import contextlib
import functools
import logging
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import fxsplit
from fxsplit.errors import RecompileWarning
from fxsplit.passes.profile.thread import run_in_worker_thread
from fxsplit.system.user_lines import is_users, warn_user


def test_files_of_torch_and_of_fxsplit_are_not_the_users() -> None:
    """torchvision's path begins as torch's does, and its lines were taken for torch's."""
    assert not is_users(str(torch.__file__)) and not is_users(str(fxsplit.__file__)) and not is_users("<string>")
    assert is_users(__file__) and is_users(str(Path(torch.__file__).parent) + "vision/ops.py")


def test_a_warning_points_at_the_users_line() -> None:
    """Any number of frames of torch and of fxsplit is skipped."""
    with pytest.warns(fxsplit.FxsplitWarning, match="through torch") as said:
        pytree.tree_map(warn_user, ["through torch"])
    assert said[0].filename == __file__
    with pytest.warns(RecompileWarning, match="by itself") as said:
        warn_user("by itself", RecompileWarning)
    assert said[0].filename == __file__
    assert issubclass(RecompileWarning, fxsplit.FxsplitWarning) and issubclass(fxsplit.FxsplitWarning, UserWarning)


def test_pythons_own_library_is_not_the_users() -> None:
    """A warning out of a context manager pointed at contextlib, which is between fxsplit and the user."""
    for module in (contextlib, functools, logging):
        assert not is_users(str(module.__file__))
    assert is_users(str(pytest.__file__))

    with pytest.warns(fxsplit.FxsplitWarning, match="through contextlib") as said, contextlib.ExitStack() as stack:
        stack.callback(warn_user, "through contextlib")
        stack.close()
    assert said[0].filename == __file__


def test_a_warning_of_a_thread_points_at_the_line_that_waits_for_it() -> None:
    """It pointed at threading.py, as no line of the user is on the stack of a worker."""
    with pytest.warns(fxsplit.FxsplitWarning, match="of a worker") as said:
        run_in_worker_thread(partial(warn_user, "of a worker"), 1, torch.device("cpu"))
    assert said[0].filename == __file__


@pytest.mark.parametrize("how", [["-m", "package.program"], ["package/program.py"]])
def test_a_program_that_python_runs_by_name_is_warned(how: list[str], tmp_path: Path) -> None:
    """Under `python -m` the warning raised ImportError: the loader knows the module by a name other than __main__."""
    (tmp_path / "package").mkdir()
    program = "from fxsplit.system.user_lines import warn_user\nwarn_user('in a program')  # of the user\n"
    (tmp_path / "package" / "program.py").write_text(program)
    done = subprocess.run([sys.executable, *how], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "program.py:2: FxsplitWarning: in a program" in done.stderr and "# of the user" in done.stderr
