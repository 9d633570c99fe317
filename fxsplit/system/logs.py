"""Log records: the logger `fxsplit`, with a child logger for each kind of record.

    emit("plan", ...) -> logger fxsplit.planner.plan -> handlers of the program; standard error and JSON lines if asked

Without FXSPLIT_LOGS and FXSPLIT_LOGS_JSON in the environment, records go only to the handlers of the program. A record
is made when something is compiled, planned, saved or loaded, and when something fails. A training step makes none.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fxsplit.errors import InputError, suggest
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

STANDARD = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime"))
"""The attributes that every log record has. The other attributes of a record are the fields given to `emit`."""


def emit(kind: Kind, event: str, message: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Send a record to the logger of its kind.

    event: a short name that programs can compare, such as "plan" or "plan_failed".
    fields: further attributes of the record. They are written to JSON lines.
    """
    logger = logging.getLogger(LOGGERS[kind])
    if logger.isEnabledFor(level):
        logger.log(level, "%s", message, extra={"event": event, **fields}, stacklevel=2)


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


def apply_settings(levels: Mapping[str, int], folder: str | os.PathLike[str] | None = None) -> None:
    """Show the records of these names, from these levels on, on standard error, and write records to a folder.

    The settings replace all earlier ones. If there is a folder and no level, the folder gets all records from INFO on,
    and standard error gets none. Raises FileError for a folder that cannot be written to.
    """
    lines = None if folder is None else JsonLines(folder)
    top = logging.getLogger(LOGGERS["all"])
    for handler in [h for h in top.handlers if isinstance(h, (Console, JsonLines))]:
        top.removeHandler(handler)
    for name in LOGGERS.values():
        logging.getLogger(name).setLevel(logging.NOTSET)
    for name, level in (levels or ({"all": logging.INFO} if lines else {})).items():
        logging.getLogger(LOGGERS[name]).setLevel(level)
    if levels:
        top.addHandler(Console())
    if lines is not None:
        top.addHandler(lines)


class Console(logging.StreamHandler[Any]):
    """Prints records on the standard error of the moment: a notebook or a test may replace `sys.stderr`."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s [%(name)s] %(message)s"))

    @property
    def stream(self) -> Any:
        """The present standard error."""
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to print a record. If the program's own handler prints the record too, do not."""
        printed = [h for h in logging.getLogger().handlers if getattr(h, "stream", None) in (sys.stdout, sys.stderr)]
        return not any(record.levelno >= h.level for h in printed) and bool(super().filter(record))

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record. If there are several ranks, the line begins with the rank."""
        rank = find_rank()
        return f"{'' if rank is None else f'[rank {rank}] '}{super().format(record)}"


class JsonLines(logging.Handler):
    """Appends each record to the file `rank-N.jsonl` of a folder, as one line of JSON.

    A line has rank, time (seconds since 1970), level, logger, event, message and the fields of the record. A process
    that is no rank writes to `rank-0.jsonl`. Raises FileError if the folder cannot be made or written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self._folder = Path(folder).absolute()  # the program may change its current folder later
        make_folder(self._folder)
        if not os.access(self._folder, os.W_OK):
            raise explain_unwritable(f"cannot write to {str(self._folder)!r}", PermissionError(13, "Permission denied"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record. An error is printed on standard error, as by all handlers of logging."""
        try:
            rank = find_rank() or 0
            line: dict[str, object] = {"rank": rank, "time": record.created, "level": record.levelname}
            line |= {"logger": record.name, "event": None, "message": record.getMessage()}
            line |= {name: value for name, value in vars(record).items() if name not in STANDARD}
            # One write to the end of the file: lines stay whole even if several processes write.
            file = os.open(self._folder / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(file, f"{json.dumps(line, default=str)}\n".encode())
            finally:
                os.close(file)
        except Exception:
            self.handleError(record)


def find_rank() -> int | None:
    """Return the rank of this process, in torch's default group or by its launcher; None without ranks."""
    distributed: Any = sys.modules.get("torch.distributed")  # planning loads no torch
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    stated = os.environ.get("RANK", "")
    return int(stated) if stated.isdecimal() else None


def read_environment() -> None:
    """Apply the environment variables. A wrong setting is only a warning, so that the program still runs."""
    folder = os.environ.get(FOLDER) or None
    try:
        levels = parse_levels(os.environ.get(SETTINGS, ""))
        if levels or folder:
            apply_settings(levels, folder)
    except InputError as error:
        warn_user(f"no logs are shown: {SETTINGS}={os.environ.get(SETTINGS, '')!r}, {FOLDER}={folder!r}: {error}")


# Without any handler, Python itself would print records of level WARNING and above.
logging.getLogger(LOGGERS["all"]).addHandler(logging.NullHandler())
read_environment()
