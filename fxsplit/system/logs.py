"""Log records of Python's logging, and two ways to see them that need no set-up.

    emit("plan", ...) --> logger fxsplit.planner.plan, for the handlers of the program
                     `--> standard error, if FXSPLIT_LOGS asks for it
                     `--> a file of JSON lines for each rank, if FXSPLIT_LOGS_JSON asks for it

The three ways are independent: the variables change no logger. A record is made when something is compiled, planned,
saved or loaded, and when something fails. A training step makes none.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from fxsplit.errors import InputError, suggest
from fxsplit.system.figures import replace_infinite
from fxsplit.system.files import explain_unwritable, make_folder
from fxsplit.system.user_lines import warn_user

SETTINGS, FOLDER = "FXSPLIT_LOGS", "FXSPLIT_LOGS_JSON"
"""The environment variables: the records to show on standard error, and the folder for JSON lines."""

Kind = Literal["phases", "passes", "plan", "compiles", "recompiles", "checkpoints", "faults"]

LOGGERS: Mapping[str, str] = {
    "all": "fxsplit",
    **{room: f"fxsplit.{room}" for room in ("system", "ir", "planner", "runtime", "api")},
    "phases": "fxsplit.system.phases",
    "passes": "fxsplit.ir.passes",
    "plan": "fxsplit.planner.plan",
    "compiles": "fxsplit.api.compiles",
    "recompiles": "fxsplit.api.recompiles",
    "checkpoints": "fxsplit.api.checkpoints",
    "faults": "fxsplit.runtime.faults",
}
"""The logger of each name in FXSPLIT_LOGS: all, a room of fxsplit, or a kind of record. A later name is more exact."""

LEVELS = {"+": logging.DEBUG, "": logging.INFO, "-": logging.ERROR}
"""The level for each sign before a name in FXSPLIT_LOGS, as in TORCH_LOGS."""


def emit(
    kind: Kind, event: str, message: str, *, error: BaseException | None = None, level: int | None = None, **fields: Any
) -> None:
    """Log a record. Never raises an error of a handler, of a filter or of `error` itself: it is printed instead.

    event: a short name that programs can compare, such as "plan" or "no_plan".
    error: its type and text are added to the message. The level is then ERROR.
    level: of logging (default: INFO).
    fields: the figures of the event, for JSON lines and for handlers, which find them in `record.fxsplit`.
    """
    level = level or (logging.INFO if error is None else logging.ERROR)
    try:
        logger = logging.getLogger(LOGGERS[kind])
        fields["event"] = event
        if error is not None:
            message = f"{message}: {format_error(error)}"
        if _settings.find_level(kind) <= level:
            _settings.show(logger.name, level, message, fields)
        if logger.isEnabledFor(level):
            logger.log(level, "%s", message, extra={"fxsplit": fields}, stacklevel=2)
    except Exception:
        # As logging itself does. Standard error may be closed.
        with suppress(Exception):
            traceback.print_exc()


def format_error(error: BaseException) -> str:
    """Return the type and the text of an error, also if its text cannot be made."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as other:
        return f"{type(error).__name__} (its text raises {type(other).__name__})"


def parse_levels(text: str) -> dict[str, int]:
    """Return the level of each name in a setting such as "plan,+passes,-faults". Raises InputError for other names."""
    found = {}
    for item in filter(None, re.split(r"[,\s]+", text)):
        sign = item[0] if item[0] in "+-" else ""
        name = item[len(sign) :]
        if name not in LOGGERS:
            raise InputError(
                f"there are no logs called {name!r}: give names of {', '.join(LOGGERS)}, with + in front for details, "
                f"or - for errors only{suggest(name, LOGGERS)}"
            )
        found[name] = LEVELS[sign]
    return found


class Settings:
    """The records that the environment asks for.

    levels: names of LOGGERS with the levels from which on their records are shown. Others are not shown.
    folder: a folder for JSON lines, in `rank-N.jsonl`; a process that is no rank writes to `rank-0.jsonl`. If there is
        no level, the folder gets all records from INFO on, and standard error gets none.

    Raises FileError for a folder that cannot be made or written to.
    """

    def __init__(self, levels: Mapping[str, int], folder: str | os.PathLike[str] | None = None) -> None:
        self._prints = bool(levels)
        self._levels = levels or ({"all": logging.INFO} if folder else {})
        self._folder = None if folder is None else Path(folder).absolute()  # the current folder may change
        self._broken = False
        if self._folder is not None:
            make_folder(self._folder)
            if not os.access(self._folder, os.W_OK):
                denied = PermissionError(13, "Permission denied")
                raise explain_unwritable(f"cannot write to {str(self._folder)!r}", denied)

    def find_level(self, kind: Kind) -> int:
        """Return the level from which on records of a kind are shown. The most exact of the chosen names decides it."""
        loggers = {LOGGERS[name]: level for name, level in self._levels.items()}
        own = [name for name in loggers if f"{LOGGERS[kind]}.".startswith(f"{name}.")]
        return loggers[max(own, key=len)] if own else logging.CRITICAL + 1

    def show(self, logger: str, level: int, message: str, fields: Mapping[str, Any]) -> None:
        """Print a record on standard error, and write it to the folder."""
        rank, now = find_rank(), time.time()
        if self._folder is not None:
            line = {"rank": rank or 0, "time": now, "level": logging.getLevelName(level), "logger": logger}
            self._write(self._folder / f"rank-{rank or 0}.jsonl", {**fields, **line, "message": message})
        if self._prints and sys.stderr is not None:
            when = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d}"
            who = "" if rank is None else f"[rank {rank}] "
            print(f"{who}{when} {logging.getLevelName(level)} [{logger}] {message}", file=sys.stderr)

    def _write(self, path: Path, line: Mapping[str, Any]) -> None:
        """Append a line of JSON to a file."""
        text = json.dumps(replace_infinite(line), default=str, allow_nan=False)
        content = f"{chr(10) * self._broken}{text}\n".encode()
        # One write to the end of the file: lines stay whole even if several processes write.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            # A full disk may take only a part. The next line then begins on a line of its own.
            self._broken = os.write(file, content) < len(content)
        finally:
            os.close(file)


def find_rank() -> int | None:
    """Return the rank of this process, in torch's default group or by its launcher; None without ranks."""
    distributed: Any = sys.modules.get("torch.distributed")  # planning loads no torch
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    stated = os.environ.get("RANK", "")
    return int(stated) if stated.isdecimal() else None


def apply_settings(levels: Mapping[str, int], folder: str | os.PathLike[str] | None = None) -> None:
    """Show the records that `Settings(levels, folder)` chooses, in place of all others."""
    global _settings
    _settings = Settings(levels, folder)


def read_environment() -> None:
    """Apply the environment variables. A wrong setting is only a warning, so that the program still runs."""
    folder = os.environ.get(FOLDER, "").strip() or None
    try:
        apply_settings(parse_levels(os.environ.get(SETTINGS, "")), folder)
    except InputError as error:
        warn_user(f"no logs are shown: {SETTINGS}={os.environ.get(SETTINGS, '')!r}, {FOLDER}={folder!r}: {error}")


_settings = Settings({})
# Without any handler, Python itself would print records of level WARNING and above.
logging.getLogger(LOGGERS["all"]).addHandler(logging.NullHandler())
read_environment()
