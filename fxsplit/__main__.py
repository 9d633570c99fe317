"""The `fxsplit` command, also as `python -m fxsplit`."""

import atexit
import os
import signal
import sys

INTERRUPTED = 130
"""The exit code of an interrupted program in a shell."""


def main() -> int:
    """Run the command and return its exit code. Ctrl-C prints one line and ends the program, also during imports."""
    # A shell makes its background jobs ignore Ctrl-C: leave them so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_interrupted)
        # At exit, Python restores the default handlers. Ctrl-C would then kill the process during its cleanup.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from fxsplit.cli.main import main as run

    return run()


def end_interrupted(number: int, frame: object) -> None:
    """End the process at once, with exit code 130.

    Raising KeyboardInterrupt would not do: some libraries swallow it, and an import that it aborts stays half loaded.
    """
    # A progress bar hides the terminal's cursor: show it again.
    shown = "\x1b[?25h" if sys.stderr.isatty() else ""
    os.write(2, f"{shown}fxsplit: interrupted\n".encode())
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
