"""`fxsplit profile MODULE:FACTORY -o FILE`: measure or estimate a model, and write the profile to plan it from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from fxsplit.cli.model_factory import FactoryResult, call_factory, describe_error
from fxsplit.cli.words import add_examples, take_text
from fxsplit.errors import FxsplitError, InputError
from fxsplit.ir.facts.costs.estimated import list_doubts
from fxsplit.system.figures import format_count
from fxsplit.system.files import check_can_write
from fxsplit.system.progress_bar import show_phase

if TYPE_CHECKING:  # torch takes a second to import, and --help does not need it
    from fxsplit.ir.facts.costs.costs import Costs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `profile`."""
    parser.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="FACTORY() returns (model, args) or (model, args, kwargs), with one whole batch; a target is left out",
    )
    parser.add_argument(
        "-o", "--output", type=take_text, metavar="OUT", required=True, help="the profile to write, as JSON"
    )
    parser.add_argument(
        "--n-microbatches",
        type=int,
        default=1,
        metavar="N",
        help="measure one of N pieces of the batch (default: 1, the whole batch)",
    )
    parser.add_argument("--device", type=take_text, default="cpu", metavar="NAME", help="where to measure, as cuda:0")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements to take the median of")
    parser.add_argument("--inference", action="store_true", help="measure forwards only, which cannot plan training")
    parser.add_argument(
        "--shapes",
        action="store_true",
        help="measure each different operator once, by itself, on a device that need not hold the model",
    )
    parser.add_argument(
        "--on",
        type=take_text,
        metavar="KIND",
        help="measure nothing, and estimate for a device elsewhere, such as h100, or a TOML file of your own",
    )
    parser.add_argument(
        "--dtype",
        type=take_text,
        metavar="NAME",
        help="--on: of the model, such as bfloat16 (default: the model's own)",
    )
    parser.add_argument(
        "--compiled", action="store_true", help="--on: as if torch.compile fused operators, which is a guess"
    )
    add_examples(
        parser,
        ("the profile of make_net() in models.py, measured here", "fxsplit profile models:make_net -o net.json"),
        (
            "one of eight pieces of its batch, measured on a GPU",
            "fxsplit profile models:make_net --n-microbatches 8 --device cuda:0 -o net.json",
        ),
        ("estimated for a GPU that is not here", "fxsplit profile models:make_net --on h100 -o net.json"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Measure the model, write its profile, and print the file and what is in it.

    Raises FileError, before the model is made, for a file that cannot be written; InputError for an invalid factory
    or for a model that raises, and the errors of `fxsplit.profile`.
    """
    # Measuring may take minutes, and an error about the file would come after them.
    check_can_write(arguments.output)
    with show_phase("loading torch"):
        from fxsplit.api.profile import profile
    costs = _measure(profile, arguments, call_factory(arguments.factory))
    costs.save(arguments.output)
    if costs.noise is not None:
        print(f"note: {costs.noise}", file=sys.stderr)
    size = f"{format_count(len(costs.nodes), 'node')}, {format_count(costs.rows, 'row')}, {costs.total_ms:.3f} ms"
    way = "forward" if costs.inference else "forward and backward"
    print(f"{arguments.output}: {size} {way}; fxsplit plan {arguments.output} reads it")
    if costs.estimated:
        print(costs.estimated.details)
    for doubt in list_doubts(costs):
        print(f"note: {doubt}", file=sys.stderr)
    return 0


def _measure(profile: Callable[..., Costs], arguments: argparse.Namespace, made: FactoryResult) -> Costs:
    """Return the costs of a model with the options of the command; `profile` is fxsplit.profile."""
    from fxsplit.ir.facts.capture.call import Call

    try:
        return profile(
            made.model,
            Call(made.args, made.kwargs),
            n_microbatches=arguments.n_microbatches,
            device=arguments.device,
            repeats=arguments.repeats,
            inference=arguments.inference,
            shapes=arguments.shapes,
            on=arguments.on,
            dtype=arguments.dtype,
            compiled=arguments.compiled,
        )
    except FxsplitError:
        raise
    except Exception as error:  # mostly the model's own error
        raise InputError(f"{arguments.factory}: {describe_error(error)}") from error
