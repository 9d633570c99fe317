"""The `fxsplit` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata

BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit code: 0 done, 1 the goal is missed, 2 bad input."""
    parser = argparse.ArgumentParser(prog="fxsplit", description="Cut a PyTorch model into stages and pipeline it.")
    parser.add_argument("--version", action="version", version=f"fxsplit {metadata.version('fxsplit')}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="train ResNet-18 as a pipeline on real images, on two CPU devices")
    commands.add_parser("passes", help="list the passes, their options and the default chain")
    arguments = parser.parse_args(argv)
    from fxsplit.errors import FxsplitError  # torch takes seconds to load, and --help needs none of it

    try:
        return _demo() if arguments.command == "demo" else _passes()
    except FxsplitError as error:
        print(f"fxsplit {arguments.command}: {error}", file=sys.stderr)
        return BAD_INPUT


def _demo() -> int:
    """Run the demo."""
    from rich.console import Console

    from fxsplit import demo

    return demo.main(Console())


def _passes() -> int:
    """Print every pass with its options and defaults."""
    import dataclasses

    from fxsplit.driver import DEFAULT
    from fxsplit.passes import PASSES

    for name, kind in PASSES.items():
        options = ",".join(f"{f.name}={str(f.default).lower()}" for f in dataclasses.fields(kind))
        print(f"{name + (f'{{{options}}}' if options else ''):<48} {(kind.__doc__ or '').splitlines()[0]}")
    print(f"\ndefault chain: {DEFAULT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
