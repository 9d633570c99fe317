"""The `fxsplit` command, also as `python -m fxsplit`."""

import atexit
import os
import signal
import sys

INTERRUPTED = 130
"""The exit code of an interrupted program in a shell."""


def main() -> int:
    """Run the command and return its exit code; Ctrl-C ends it with one line, also while it is being loaded."""
    # Only where Ctrl-C is not ignored, as it is in a background job of a shell.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_interrupted)
        # When the command is over, Python drops its handlers, and Ctrl-C would kill it in the middle of its last work.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from fxsplit.cli.main import main as run

    return run()


def end_interrupted(number: int, frame: object) -> None:
    """End the program at once; KeyboardInterrupt would be lost in some libraries, and abort the loading of others."""
    # A progress bar hides the terminal's cursor.
    shown = "\x1b[?25h" if sys.stderr.isatty() else ""
    os.write(2, f"{shown}fxsplit: interrupted\n".encode())
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
