"""`fxsplit verify MODULE:FACTORY`: prove that a model's pipeline computes the same as the model."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fxsplit.cli.model_factory import FactoryResult, call_factory, describe_error, import_object
from fxsplit.cli.output import print_json, print_parts
from fxsplit.cli.words import (
    add_constraints,
    add_examples,
    add_json,
    add_reproducer,
    add_schedule,
    parse_pins,
    split_together,
    take_text,
)
from fxsplit.errors import FxsplitError, InputError, suggest
from fxsplit.ir.facts.given.machine import check_device_count
from fxsplit.schedule import RUNNABLE
from fxsplit.schedule.generators.catalogue import SEARCH
from fxsplit.system.figures import SHOWN, parse_bytes
from fxsplit.system.progress_bar import show_phase

if TYPE_CHECKING:  # torch takes a second to import, and --help does not need it
    from fxsplit.api.verify.verify import Verification

CHAIN = "profile{repeats=1},augment,order,partition,emit"
"""The default passes. One repeat suffices, since the results do not depend on exact costs."""

AS_TYPED = (
    "n_microbatches",
    "schedule",
    "stages_per_device",
    "recompute",
    "deferred_batch_norm",
    "stage_backend",
    "inference",
    "best",
    "weights",
    "passes",
    "costs",
    "compress",
    "gradient_hook",
    "dump",
    "plan",
    "reproducer",
)
"""The options that compile() gets as they were typed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `verify`."""
    parser.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="FACTORY() returns (model, args), or (model, args, kwargs), or (model, args, kwargs, target)",
    )
    parser.add_argument(
        "--loss-fn",
        type=take_text,
        metavar="MODULE:NAME",
        help="the loss of outputs and FACTORY's target",
    )
    parser.add_argument(
        "--devices",
        type=take_text,
        metavar="N|NAMES",
        help="CPU devices, or names such as cuda:0,cuda:1 (default: 2; under torchrun each rank is a device)",
    )
    parser.add_argument(
        "--pipelines", type=int, metavar="N", help="under torchrun: data-parallel pipelines (default: 1)"
    )
    _add_options_of_compile(parser)
    add_json(parser)
    add_examples(
        parser,
        ("whether the pipeline of make_net() in models.py equals the model", "fxsplit verify models:make_net"),
        (
            "the same with a loss, on four devices",
            "fxsplit verify models:make_net --loss-fn torch.nn.functional:cross_entropy --devices 4",
        ),
        ("the same on two ranks", "torchrun --nproc-per-node=2 -m fxsplit verify models:make_net"),
    )


def _add_options_of_compile(parser: argparse.ArgumentParser) -> None:
    """Add the options of compile(), under the same names. compile() checks their values."""
    parser.add_argument("--gradient-hook", type=take_text, metavar="HOOK", help="under torchrun: what adds gradients")
    parser.add_argument(
        "--bucket-bytes",
        type=take_text,
        metavar="SIZE",
        help="under torchrun: how much is added at a time (default: 25MB)",
    )
    parser.add_argument(
        "--n-microbatches", type=_take_count, metavar="N|auto", help="default: two a device, if rows allow"
    )
    add_schedule(parser, (*RUNNABLE, SEARCH, "auto", "a .csv file in torch's format"))
    parser.add_argument("--stages-per-device", type=int, metavar="N", help="default: the schedule's own number")
    parser.add_argument("--recompute", type=take_text, default="plan", metavar="WHEN", help="when stages recompute")
    parser.add_argument("--compress", type=take_text, metavar="HOW", help="bf16 or int8 (default: cuts are exact)")
    parser.add_argument(
        "--chunks",
        action="append",
        default=[],
        metavar="NAME=DIM",
        help="the dimension of an argument that holds its batch, or NAME=replicate (default: found)",
    )
    parser.add_argument("--deferred-batch-norm", action="store_true", help="count statistics once a batch")
    parser.add_argument(
        "--stage-backend", type=take_text, metavar="NAME", help="what compiles stages, as inductor (default: nothing)"
    )
    parser.add_argument("--inference", action="store_true", help="plan for outputs without gradients")
    parser.add_argument("--best", action="store_true", help="plan for the shortest step, with replicas")
    parser.add_argument(
        "--weights", type=take_text, metavar="PATH", help="a safetensors checkpoint (default: FACTORY's weights)"
    )
    parser.add_argument(
        "--dtype", type=take_text, metavar="NAME", help="what --weights are converted to (default: they are not)"
    )
    parser.add_argument("--costs", type=take_text, metavar="FILE", help="a saved profile (default: costs are measured)")
    parser.add_argument("--passes", type=take_text, default=CHAIN, metavar="CHAIN", help="the chain of passes")
    parser.add_argument("--dump", type=take_text, metavar="FOLDER", help="write the IR after each pass")
    add_constraints(parser)
    parser.add_argument("--plan", type=take_text, metavar="PLAN", help="the stages of a saved plan (default: search)")
    add_reproducer(parser, "")


def main(arguments: argparse.Namespace) -> int:
    """Verify the pipeline and print the differences; return 0 if it equals the model, else 1.

    Under a launcher every rank runs this, and the first one prints. Raises InputError for an invalid factory, for a
    model that raises, and for options that need several ranks.
    """
    with show_phase("loading torch"):
        from fxsplit.cli.verify.launched import join_ranks
        from fxsplit.ir.facts.capture.call import Call
        from fxsplit.runtime.ranks.world.join import is_launched

    if is_launched():
        if arguments.devices is not None:
            raise InputError(f"--devices {arguments.devices}: under a launcher each rank is a device, so leave it out")
        with join_ranks(1 if arguments.pipelines is None else arguments.pipelines) as launched:
            made = call_factory(arguments.factory)
            call, target = launched.take_rows(made.model, Call(made.args, made.kwargs), made.target)
            own = FactoryResult(made.model, call.args, call.kwargs, target)
            return _verify(arguments, launched.devices, own, quiet=not launched.leads)
    for name in ("pipelines", "gradient_hook", "bucket_bytes"):
        if getattr(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} is for several ranks: torchrun --nproc-per-node=4 -m fxsplit verify ...")
    return _verify(arguments, _read_devices(arguments.devices or "2"), call_factory(arguments.factory))


def _verify(arguments: argparse.Namespace, devices: Any, made: FactoryResult, *, quiet: bool = False) -> int:
    """Compile and verify a model, print the result unless `quiet`, and return the exit code."""
    from fxsplit.api.compile import compile
    from fxsplit.api.verify.verify import verify

    loss_fn = None
    if arguments.loss_fn is not None:
        loss_fn = import_object(arguments.loss_fn, "MODULE:NAME, such as torch.nn.functional:cross_entropy")
    # Refuse one without the other, which would be ignored silently.
    if (loss_fn is None) != (made.target is None):
        raise InputError(
            f"{arguments.factory!r} returns a target and --loss-fn is missing: name a function of outputs and target, "
            "such as --loss-fn torch.nn.functional:cross_entropy"
            if loss_fn is None
            else f"--loss-fn {arguments.loss_fn}: {arguments.factory!r} returns no target for it: return "
            "(model, args, kwargs, target)"
        )
    # Collect warnings and print each once below: compiling the model twice repeats most of them.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with compile(
                made.model,
                devices,
                loss_fn=loss_fn,
                chunks=_read_chunks(arguments.chunks),
                dtype=None if arguments.dtype is None else _read_dtype(arguments.dtype),
                bucket_bytes=_read_size(arguments.bucket_bytes),
                pins=parse_pins(arguments.pins),
                together=split_together(arguments.together),
                **{name: getattr(arguments, name) for name in AS_TYPED},
            ) as pipe:
                # With data-parallel pipelines some have fewer rows, and ranks compile for one shape.
                if pipe.compiler.compile_group is None:
                    pipe.compile_for(*made.args, **made.kwargs)
                found = verify(pipe, made.args, made.kwargs, target=made.target)
        except FxsplitError:
            raise
        except Exception as error:  # mostly the model's own error, which proves nothing about its pipeline
            raise InputError(f"{arguments.factory}: {describe_error(error)}") from error
    if quiet:
        return 0 if found.equal else 1
    # Use standard error, since standard output may be JSON.
    for text in dict.fromkeys(str(w.message) for w in said if issubclass(w.category, UserWarning)):
        print(f"fxsplit verify: {text}", file=sys.stderr)
    if arguments.json:
        print_json(describe(found))
    else:
        print_parts(found.show())
    return 0 if found.equal else 1


def _take_count(text: str) -> int | str:
    """Return a number that was typed, or the text, which compile() takes or refuses; for argparse."""
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else take_text(text)


def _read_devices(text: str) -> list[str]:
    """Return the devices that --devices states: a number of CPU devices, or devices by name."""
    if not re.fullmatch(r"-?\d{1,18}", text):
        return text.split(",")
    check_device_count(int(text))
    return ["cpu"] * int(text)


def _read_chunks(texts: list[str]) -> dict[str, Any] | None:
    """Return the dimensions of --chunks by argument; raises InputError for a text that is not NAME=DIM."""
    from fxsplit.ir.facts.capture.chunks import Replicate

    chunks: dict[str, Any] = {}
    for text in texts:
        name, _, dim = text.rpartition("=")
        if not name or not (dim == "replicate" or re.fullmatch(r"-?\d{1,9}", dim)):
            raise InputError(f"--chunks {text[:SHOWN]}: give an argument and its dimension, such as x=1 or x=replicate")
        chunks[name] = Replicate if dim == "replicate" else int(dim)
    return chunks or None


def _read_dtype(name: str) -> Any:
    """Return a dtype of torch by its name; raises InputError for any other name."""
    import torch

    known = {key: value for key, value in vars(torch).items() if isinstance(value, torch.dtype)}
    if name not in known:
        raise InputError(f"--dtype {name[:SHOWN]}: give a dtype of torch, such as float32{suggest(name, known)}")
    return known[name]


def _read_size(text: str | None) -> float | None:
    """Return a number of bytes, such as 25MB; raises InputError for any other text."""
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise InputError(f"--bucket-bytes {text}: {error}") from error


def describe(found: Verification) -> dict[str, Any]:
    """Return a verification as a JSON object for other programs."""
    return {
        "equal": found.equal,
        "max_relative_difference": found.largest,
        "front_end": found.front_end,
        "nodes": found.nodes,
        "stages": found.stages,
        "n_microbatches": found.n_microbatches,
        "dtype": str(found.dtype).removeprefix("torch."),
        "loss": found.loss,
        "offending": [f"{d.kind} {d.name}" for d in found.offending],
        "differs_from_whole_batch": list(found.by_nature),
        "compression": None if found.compression is None else asdict(found.compression),
        "passes": None if found.passes is None else asdict(found.passes),
        "gradient_hook": None if found.gradient_hook is None else asdict(found.gradient_hook),
    }
