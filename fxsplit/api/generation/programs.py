"""Compile the steps that a pipeline generates with, and run them.

Each step is captured, planned and run like any other model. All steps have a weight, and the keys and values of a
layer, on the same device, so that each step finds the keys and values that the previous step left.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, fx, nn

from fxsplit.api.compiler.compiler import Compiler, get_mode
from fxsplit.api.compiler.lowering import pin_weights
from fxsplit.api.generation.cache import CacheShapes
from fxsplit.api.generation.steps import (
    make_encode,
    make_first_after_encoder,
    make_next_after_encoder,
    make_step,
)
from fxsplit.errors import InputError, TraceError
from fxsplit.ir.facts.capture.call import Call
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.capture.scope import Scope
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.graph import IR
from fxsplit.runtime.engine import Engine
from fxsplit.runtime.program import Batch, Program
from fxsplit.torch_internals.fx.dependences import list_node_weights
from fxsplit.torch_internals.fx.interpret import get_storage_id
from fxsplit.torch_internals.fx.kv_cache import KVCaches, find_slot
from fxsplit.torch_internals.scopes.undo import restore_after

LEAST_LENGTH = 4
"""The fewest tokens in an example of a next step: torch.export would take a length near 1 for a constant."""


class Generation:
    """One call of generate(), which makes one text for each row.

    It holds the keys and values of the rows, which lie in the stages, and the prepared batch of each step by its name.

    most: the largest number of tokens of a row.
    """

    def __init__(self, most: int) -> None:
        self.kv_caches = KVCaches(most)
        self.prepared: dict[str, Batch] = {}


class Programs:
    """The steps that a model generates with, compiled when they are first needed. `compiler` is the pipeline's.

    start: the pipeline's method that returns its engine for a program. Only a weak reference to the pipeline is kept.
    """

    def __init__(self, compiler: Compiler, start: Callable[[Program], Engine]) -> None:
        self._compiler = compiler
        self._start = weakref.WeakMethod(start)
        self._steps: dict[str, Compiler] = {}

    @property
    def model(self) -> nn.Module:
        """The model that generates."""
        return self._compiler.model

    def list_programs(self) -> list[Program]:
        """Return the programs of the compiled steps, in the order in which they were compiled."""
        found = [step.get_compiled("eval") for step in self._steps.values()]
        return [compiled.program for compiled in found if compiled is not None]

    def settle(self) -> None:
        """Move weights to the devices of the programs, or forget programs that need weights on other devices.

        Raises InputError for a pipeline that will read its weights only when it compiles, and for a pipeline with
        several stages on a device.
        """
        if self._compiler.weights is not None:
            raise InputError(
                "the checkpoint of weights= is read when the pipeline compiles, and it has not compiled yet: give "
                "compile() example_inputs=, or call the pipeline once, before generate()"
            )
        placed = self._find_placed()
        homes = [] if placed is None else [device for home in placed.homes for device in home]
        if placed is not None and (len(set(homes)) < len(homes) or len(homes) > len(placed.homes)):
            raise InputError(
                f"{placed.scheduler.name} puts several stages on a device here, or a stage on several, and generate() "
                "needs one for each: compile another pipeline for it, with inference=True"
            )
        places = [place for program in self.list_programs() for place in program.list_placed()]
        if all(weight.device == device for weight, device in places):
            return
        if placed is None:
            for step in self._steps.values():
                step.place_all()
        else:
            self._steps.clear()

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the encoder's output."""
        self._add("encode", lambda: make_encode(self.model))
        return self._run("encode", tensors, Generation(0))

    def run_first(self, tensors: dict[str, Tensor], text: Generation) -> Tensor:
        """Return the logits (rows, 1, vocabulary) that follow a prompt.

        The first call compiles the first and the next step.
        """
        if not self._steps.keys() & {"first", "next"}:
            try:
                self._compile_steps(tensors, text.kv_caches.most)
            except BaseException:
                # One step is of no use without the other, and the next call must compile both again.
                for name in ("first", "next"):
                    self._steps.pop(name, None)
                raise
        return self._run("first", tensors, text)

    def run_next(self, tensors: dict[str, Tensor], text: Generation) -> Tensor:
        """Return the logits (rows, 1, vocabulary) that follow one more token of each row."""
        return self._run("next", tensors, text)

    def _compile_steps(self, tensors: dict[str, Tensor], most: int) -> None:
        """Compile the first step and the next step, for up to `most` tokens, with weights on the same devices."""
        # A decoder is planned for its next step, which makes most of a text. After an encoder the first step also has a
        # single token, and it has all the weights, so it is planned for.
        if "decoder_input_ids" in tensors:
            shapes = CacheShapes()
            self._add("first", lambda: make_first_after_encoder(self.model, shapes))
            self._compile("first", tensors)
            self._add("next", lambda: make_next_after_encoder(self.model, shapes))
            self._compile("next", make_example(tensors, most))
        else:
            self._add("next", lambda: make_step(self.model, first=False))
            self._compile("next", make_example(tensors, most))
            self._add("first", lambda: make_step(self.model, first=True))
        self._check_lengths(make_example(tensors, max(most, LEAST_LENGTH) + 1))

    def _check_lengths(self, longer: dict[str, Tensor]) -> None:
        """Raise TraceError if the next step was exported for one length only: every token would then need a compile.

        longer: tensors of a next step with one more token.
        """
        compiled = self._steps["next"].get_compiled("eval")
        assert compiled is not None, "compiled just now"
        if compiled.captured[Scope].other_shapes(list(longer.values())) is not None:
            self._steps.clear()
            raise TraceError(
                f"a step of {type(self.model).__name__} with a cache can be exported for only one length, and every "
                "token changes the length: call pipe.model.generate() with the model on one device"
            )

    def _add(self, name: str, make: Callable[[], nn.Module]) -> None:
        """Make the compiler of the step `name`, unless there is one; `make` returns the step's module."""
        if name in self._steps:
            return
        options = self._compiler.options.for_inference()
        # The user's statements about arguments are for the model's own forward(), and a step has other arguments.
        options = replace(options, chunks=None, costs=None, dump=None, observed=False, lengths_open=True)
        if not isinstance(options.n_microbatches, int):
            options = replace(options, n_microbatches=None)
        known = self._compiler.get_compiled(get_mode(self.model))
        from_shapes = known is not None and known.captured[Example].from_shapes
        made = self._steps[name] = Compiler(make(), options, from_shapes=from_shapes)
        # Neither function refers to these programs, which would keep the pipeline's workers until a collection.
        find, compiler = weakref.WeakMethod(self._pin), self._compiler
        made.pin = lambda captured: pin(captured) if (pin := find()) is not None else captured
        made.pause = lambda: compiler.pause()

    def _compile(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Compile a step for tensors like these, unless it is compiled. Forget the step if compiling fails."""
        step = self._steps[name]
        stated = step.options.n_microbatches
        try:
            step.program("eval", Call((), tensors if stated is None else repeat_rows(tensors, int(stated))))
        except BaseException:
            del self._steps[name]
            raise

    def _run(self, name: str, tensors: dict[str, Tensor], text: Generation) -> Tensor:
        """Run the step `name` on tensors, and return its result."""
        start = self._start()
        assert start is not None, "the pipeline is there, as it generates"
        batch = self._prepare(name, tensors, text)
        program, engine = batch.program, start(batch.program)
        # Weights do not change during a text, so only its first steps refresh the copies on other devices.
        handle = engine.begin_forward(batch, refresh=name not in text.prepared)
        text.prepared[name] = batch
        with restore_after(partial(engine.give_up_forward, handle)):
            found: Tensor = program.build_result(engine.finish_forward(batch, handle))
        return found

    def _prepare(self, name: str, tensors: dict[str, Tensor], text: Generation) -> Batch:
        """Return a step ready to run. Only the first steps of a text check that the program still fits the model."""
        if self._steps[name].get_compiled("eval") is None:
            self._compile(name, tensors)
        known, compiled = text.prepared.get(name), self._steps[name].get_compiled("eval")
        if known is not None and compiled is not None and compiled.program is known.program:
            given = [tensors[spec.name] for spec in known.program.inputs.specs]
            if compiled.captured[Scope].other_shapes(given) is None:
                return known._replace(tensors=given)
        return self._steps[name].prepare("eval", Call((), tensors))._replace(kv_caches=text.kv_caches)

    def draw(self) -> bool:
        """Return whether a step draws random numbers: some models draw even in evaluation."""
        return any(program.draws() for program in self.list_programs())

    def _pin(self, captured: IR) -> IR:
        """Return a captured step with pins: its weights, keys and values stay on the stages of existing programs."""
        programs = [*self.list_programs(), *self._compiler.list_programs()]
        pins = [pin_read_weights(captured, programs), *(pin_kv_caches(captured, program) for program in programs)]
        return captured.learn(Pins.join(pins)) if programs else captured

    def _find_placed(self) -> Program | None:
        """Return the pipeline's own program, which determines where weights are; None if it has not compiled."""
        compiled = self._compiler.get_compiled(get_mode(self.model))
        return None if compiled is None else compiled.program


def make_example(tensors: dict[str, Tensor], most: int) -> dict[str, Tensor]:
    """Return example tensors to capture the next step with, after `most` tokens, made from the first step's tensors."""
    made = {name: t for name, t in tensors.items() if name != "encoded"}
    prefix = "decoder_" if "encoded" in tensors else ""
    ids, mask = f"{prefix}input_ids", f"{prefix}attention_mask"
    rows = len(made[ids])
    made[mask] = made[mask].new_ones((rows, max(most, LEAST_LENGTH)))
    for name in (ids, "position_ids"):
        if name in made:
            made[name] = made[name][:, -1:].clone(memory_format=torch.contiguous_format)
    return made


def repeat_rows(tensors: dict[str, Tensor], least: int) -> dict[str, Tensor]:
    """Return tensors with at least `least` rows, repeated if need be: an example needs a row for each microbatch."""
    rows = next(iter(tensors.values())).shape[0]
    if rows >= least:
        return tensors
    chosen = torch.arange(least) % rows
    return {name: t.index_select(0, chosen.to(t.device)) for name, t in tensors.items()}


def pin_read_weights(captured: IR, others: Sequence[Program]) -> Pins:
    """Return pins that keep weights on the stages of other programs, except weights that this graph reads more often.

    An embedding that is also the last layer, for example: a decoder reads it twice, but an encoder only once.
    """
    here = count_readers([captured.gm])
    counts = [count_readers([stage.module for stage in other.stages.stages]) for other in others]
    pins = pin_weights(captured, others)
    more = {
        node.name
        for node in captured.gm.graph.nodes
        for weight in list_node_weights(captured.gm, node)
        if here[key := get_storage_id(weight)] > max((there[key] for there in counts), default=0)
    }
    found = {name: stage for name, stage in pins.stages.items() if name not in more}
    return Pins(found, optional=frozenset(found))


def count_readers(graphs: Sequence[fx.GraphModule]) -> Counter[int]:
    """Return how many nodes of the graphs hold each weight, by the id of the weight's memory."""
    return Counter(get_storage_id(w) for gm in graphs for node in gm.graph.nodes for w in list_node_weights(gm, node))


def pin_kv_caches(captured: IR, other: Program) -> Pins:
    """Return pins that keep the keys and values of each layer on the stage where another program has them."""
    homes = {
        node.args[at]: planned.devices[0]
        for stage, planned in zip(other.stages.stages, other.plan.stages, strict=True)
        for node in stage.module.graph.nodes
        if (at := find_slot(node.target)) is not None
    }
    found = {
        node.name: homes[node.args[at]]
        for node in captured.gm.graph.nodes
        if (at := find_slot(node.target)) is not None and node.args[at] in homes
    }
    return Pins(found, optional=frozenset(found))
