"""`fxsplit opt FILE -p CHAIN`: run passes on an IR in a file, and print the IR that they make.

If a pass fails, a *reproducer* is written: a file with the IR before that pass and the rest of the chain, on which
`fxsplit opt` fails in the same way again.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext, redirect_stdout
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fxsplit.cli.output import print_error, to_json
from fxsplit.cli.words import add_examples, add_json, add_reproducer, take_text
from fxsplit.errors import ChainError, InputError, NoFit, suggest
from fxsplit.ir.chain import Chain, parse_chain, pass_text
from fxsplit.ir.graph import IR, name_pass
from fxsplit.ir.manager import Observer, accept, run_chain, verify_ir
from fxsplit.ir.observers import REPRODUCER, Differ, Printer, Reproducer, Timer, describe_run, find_chain
from fxsplit.ir.text.write import render
from fxsplit.system.figures import show
from fxsplit.system.files import write_whole

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `opt`."""
    parser.add_argument(
        "file",
        metavar="FILE|-|MODULE:FACTORY",
        type=take_text,
        help="an IR, a profile, or a model: FACTORY() returns (model, args); - reads the standard input",
    )
    parser.add_argument(
        "-p", "--passes", type=take_text, metavar="CHAIN", help="passes to run (default: a reproducer's, else none)"
    )
    parser.add_argument(
        "-o", "--output", type=take_text, metavar="OUT", help="the file to write (default: the standard output)"
    )
    parser.add_argument(
        "--model", type=take_text, metavar="MODULE:FACTORY", help="the model that the graph calls (default: none)"
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="plan for N equal devices (default: the file's, else 2)"
    )
    parser.add_argument(
        "--machine", type=take_text, metavar="TOML", help="plan for the machine in a file (default: the file's own)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FACT.FIELD=VALUE",
        help="change a fact, as Workload.n_microbatches=8 (default: none)",
    )
    parser.add_argument(
        "--from", dest="begin", type=take_text, metavar="PASS", help="leave out the passes before PASS (default: none)"
    )
    parser.add_argument("--until", type=take_text, metavar="PASS", help="stop after PASS (default: the last)")
    parser.add_argument("--trust", action="store_true", help="import the passes that a reproducer names")
    _add_observers(parser)
    parser.add_argument("--verify-roundtrip", action="store_true", help="check that the text reads back as it is")
    parser.add_argument("--no-verify", action="store_true", help="do not verify the facts after each pass")
    parser.add_argument(
        "--emit-json", choices=("plan", "costs"), help="print a fact instead of the IR (default: the IR)"
    )
    add_json(parser)
    add_examples(
        parser,
        ("what a pass changes in an IR", "fxsplit opt ir/03-order.ir -p partition{recompute=auto} --diff"),
        ("a plan without model or torch", "fxsplit opt ir/03-order.ir -p partition --emit-json plan > plan.json"),
        ("the graph of make_net() in models.py", "fxsplit opt models:make_net -o net.ir"),
        ("a failure that fxsplit has kept, again", "fxsplit opt fxsplit-repro.ir"),
    )


def _add_observers(parser: argparse.ArgumentParser) -> None:
    """Add the options that show what the passes do."""
    names = "NAMES|all"
    parser.add_argument(
        "--print-before", type=take_text, metavar=names, help="print the IR before these passes (default: none)"
    )
    parser.add_argument(
        "--print-after",
        type=take_text,
        metavar=f"{names}|changed|failed",
        help="print the IR after these passes (default: none)",
    )
    parser.add_argument(
        "--dump", type=take_text, metavar="FOLDER", help="write the IR after each pass (default: nowhere)"
    )
    parser.add_argument("--diff", action="store_true", help="print what each pass changes in the text")
    parser.add_argument("--timing", action="store_true", help="print the time of each pass, on standard error")
    parser.add_argument("--stats", action="store_true", help="print the figures of each pass, on standard error")
    add_reproducer(parser, REPRODUCER)
    parser.add_argument(
        "--local", action="store_true", help="also write a reproducer that is as small as the failure allows"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the passes and print the IR; return 1 if a pass fails.

    Raises InputError, IRSyntaxError or ProfileError for bad input, ChainError for a chain that cannot be read, and
    NoFit if no plan fits.
    """
    begin = time.perf_counter()
    from fxsplit.api.toolkit.run import choose_check

    text, ir = _read(arguments)
    load_s = time.perf_counter() - begin
    for change in arguments.set:
        from fxsplit.api.toolkit.from_file import set_field

        ir = set_field(ir, change)
    if arguments.verify_roundtrip:
        _check_roundtrip(text, arguments.file)
    chain = _choose_passes(arguments, text)
    timer, reproducer = Timer(), Reproducer(_choose_reproducer(arguments))
    observers = [*_make_observers(arguments, chain), timer, reproducer]
    try:
        if not arguments.no_verify:
            verify_ir(ir)
        check = accept if arguments.no_verify else choose_check(ir)
        # What passes print must not mix with a result that another program reads.
        with redirect_stdout(sys.stderr) if _has_result(arguments) else nullcontext():
            final = run_chain(ir, chain, observers, check, verify=not arguments.no_verify)
    except NoFit:
        raise
    except SystemExit as stop:
        raise ChainError(f"a pass ended the program (SystemExit: {stop}): let it raise an error") from stop
    except Exception as error:
        if not reproducer.written:
            raise
        rest = chain[len(timer.rows) :]
        _report(error, reproducer.path, len(chain), rest)
        if arguments.local:
            _shrink(reproducer, error, rest, verify=not arguments.no_verify)
        return FAILED
    if arguments.timing:
        print_error(str(timer))
    if arguments.stats:
        print_error(timer.show_noted())
    if arguments.output not in (None, "-"):
        write_whole(arguments.output, _make_result(arguments, final, timer, load_s))
    elif _has_result(arguments):
        sys.stdout.write(_make_result(arguments, final, timer, load_s))
    return 0


def _read(arguments: argparse.Namespace) -> tuple[str, IR]:
    """Return the text of the file and its IR; a model is captured, and its text is that of the captured IR."""
    from fxsplit.api.toolkit.from_file import place_on, read_planned
    from fxsplit.api.toolkit.parse_ir import read_text

    name = arguments.file
    if arguments.machine is not None and arguments.devices is not None:
        raise InputError("--machine says which devices there are: leave out --devices")
    if _is_factory(name):
        if arguments.model is not None:
            raise InputError(f"--model {arguments.model}: {name} is a model already")
        ir = _capture(arguments, name)
        return render(ir), ir
    text = sys.stdin.read() if name == "-" else read_text(name)
    shown = "<stdin>" if name == "-" else name
    ir = read_planned(text, shown) if arguments.model is None else _attach(arguments, text, shown)
    if arguments.machine is not None or arguments.devices is not None:
        ir = place_on(ir, _read_machine(arguments))
    return text, ir


def _is_factory(name: str) -> bool:
    """Return whether the argument is MODULE:FACTORY, and no file."""
    module, _, function = name.partition(":")
    dotted = module.replace(".", "").isidentifier()
    return dotted and function.isidentifier() and not Path(name).exists()


def _read_machine(arguments: argparse.Namespace) -> Any:
    """Return the machine of --machine or --devices."""
    from fxsplit.formats.machine_toml import read_machine
    from fxsplit.ir.facts.given.machine import Machine

    return Machine.planned(arguments.devices) if arguments.machine is None else read_machine(arguments.machine)


def _capture(arguments: argparse.Namespace, name: str) -> IR:
    """Return the IR of the model that a factory makes."""
    from fxsplit.api.toolkit.capture import capture
    from fxsplit.cli.model_factory import call_factory
    from fxsplit.ir.facts.capture.call import Call
    from fxsplit.passes import PASSES

    made = call_factory(name)
    where: Any = _read_machine(arguments) if arguments.machine is not None else arguments.devices or 2
    # Capturing decides whether a submodule stays whole, and comes before every pass.
    chain = parse_chain(arguments.passes, PASSES) if arguments.passes else ()
    leaves = [step.path for step in chain if isinstance(step, PASSES["leaf"])]
    return capture(made.model, Call(made.args, made.kwargs), devices=where, leaves=leaves)


def _attach(arguments: argparse.Namespace, text: str, name: str) -> IR:
    """Return the IR in a text with the graph on the model of --model, which has been captured for its example."""
    from fxsplit.api.toolkit.capture import attach
    from fxsplit.cli.model_factory import call_factory

    made = call_factory(arguments.model)
    return attach(text, name, made.model, made.args, made.kwargs, sets_mode=True)


def _check_roundtrip(text: str, name: str) -> None:
    """Raise InputError, with the first line that differs, unless the text of an IR reads back as it is."""
    from fxsplit.api.toolkit.parse_ir import parse_ir

    written = render(parse_ir(text, name, torch=False))
    body = text[text.index("fxsplit-ir") :] if "fxsplit-ir" in text else text
    if written == body:
        return
    pairs = zip_longest(body.split("\n"), written.split("\n"), fillvalue="")
    number, (was, now) = next(((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1]), (0, ("", "")))
    raise InputError(
        f"{name} does not read back as it is: line {number} is {was[:100]!r}, and comes out as {now[:100]!r}"
    )


def _choose_passes(arguments: argparse.Namespace, text: str) -> Chain:
    """Return the chain of -p, or else the chain in a reproducer, without passes before --from and after --until."""
    from fxsplit.passes import PASSES

    said = arguments.passes or find_chain(text)
    if arguments.passes is None and said is not None and ":" in said and not arguments.trust:
        raise InputError(
            f"{arguments.file} runs passes that it would import: {show(said, 200)}; give --trust if you know the file"
        )
    chain = Chain(()) if said is None else parse_chain(said, PASSES)
    chain = chain if arguments.begin is None else chain.from_(arguments.begin)
    return chain if arguments.until is None else chain.until(arguments.until)


def _make_observers(arguments: argparse.Namespace, chain: Chain) -> list[Observer]:
    """Return the observers that the options ask for."""
    found: list[Observer] = []
    before, after = (_split(names) for names in (arguments.print_before, arguments.print_after))
    steps = ["all", *map(name_pass, chain)]
    for asked, names in ((before, steps), (after, [*steps, "trace", "changed", "failed"])):
        odd = next((name for name in asked if name not in names), None)
        if odd is not None:
            raise InputError(f"nothing is printed for {odd!r}: there are {', '.join(names)}{suggest(odd, names)}")
    if before or after:
        found.append(Printer(before, after))
    if arguments.diff:
        found.append(Differ())
    if arguments.dump is not None:
        from fxsplit.ir.dump import DumpTo

        found.append(DumpTo(Path(arguments.dump), str(chain)))
    return found


def _split(names: str | None) -> tuple[str, ...]:
    """Return names that are separated by commas."""
    return tuple(filter(None, (name.strip() for name in (names or "").split(","))))


def _report(error: Exception, path: Path, count: int, rest: Chain) -> None:
    """Print which pass has failed, the error, and the path of the reproducer.

    count: the number of passes in the chain. rest: the failed pass and the passes after it.
    """
    place = f"pass {count - len(rest) + 1} of {count}, {pass_text(rest[0])!r}"
    print_error(f"fxsplit opt: {place}: {type(error).__name__}: {error}")
    print_error(f"reproducer: {path}, run: {describe_run(path, rest)}")


def _shrink(reproducer: Reproducer, error: Exception, rest: Chain, *, verify: bool) -> None:
    """Write a second reproducer without the nodes and facts that the failure does not need. Print how many remain."""
    from fxsplit.api.toolkit.parse_ir import parse_ir, read_text
    from fxsplit.api.toolkit.shrink import shrink

    whole = parse_ir(read_text(reproducer.path), str(reproducer.path), torch=False)
    small = shrink(whole, rest[0], error, verify=verify)
    if small is whole:
        print_error("--local: the pass does not fail in this way without the model, or needs all that is there")
        return
    reproducer.path = reproducer.path.with_name(f"{reproducer.path.stem}-small.ir")
    reproducer.write(rest[:1], error, render(small))
    nodes = (len(ir.gm.graph.nodes) for ir in (whole, small))
    facts = (len(ir.facts) for ir in (whole, small))
    print_error("--local: {} nodes became {}, and {} facts {}, in {}".format(*nodes, *facts, reproducer.path))


def _choose_reproducer(arguments: argparse.Namespace) -> Path:
    """Return the file for a reproducer: another one if it would overwrite the file that is read."""
    path = Reproducer(Path(arguments.reproducer)).path
    same = path.exists() and Path(arguments.file).exists() and path.samefile(arguments.file)
    return path.with_name(f"{path.stem}-again.ir") if same else path


def _has_result(arguments: argparse.Namespace) -> bool:
    """Return whether the standard output is for the IR, or for JSON."""
    if arguments.output not in (None, "-"):
        return False
    return arguments.json or arguments.emit_json is not None or not (arguments.diff or arguments.verify_roundtrip)


def _make_result(arguments: argparse.Namespace, ir: IR, timer: Timer, load_s: float) -> str:
    """Return the text of the IR or of one of its facts, or the JSON that the options ask for."""
    if arguments.emit_json == "plan":
        from fxsplit.formats.plan_json import describe_plan
        from fxsplit.ir.facts.plan import Plan

        # The keys of `fxsplit plan --json`: reading the file, enumerating states, and searching.
        taken = {step.name: step.seconds for step in ir.steps}
        states = taken.get("augment", 0.0) + taken.get("order", 0.0)
        seconds = {"load": load_s, "states": states, "solve": taken.get("partition", 0.0)}
        return to_json(describe_plan(_find(ir, Plan)) | {"unit": "ms", "seconds": seconds})
    if arguments.emit_json == "costs":
        from fxsplit.ir.facts.costs.costs import Costs

        text: str = _find(ir, Costs).to_text()
        return text
    if arguments.json:
        return to_json({"passes": timer.rows, "known": [kind.__name__ for kind in ir.facts]})
    return render(ir)


def _find(ir: IR, kind: type[Any]) -> Any:
    """Return a fact that is to be printed. Raises InputError, with the next step, if it is not known."""
    try:
        return ir[kind]
    except ChainError as error:
        raise InputError(f"--emit-json {kind.__name__.lower()}: {error}") from error
