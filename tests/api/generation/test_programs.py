"""All programs of a generation keep weights, keys and values on the same stages."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, fx, nn

import fxsplit
from fxsplit.api.compiler.compiler import Compiler
from fxsplit.api.generation.programs import count_readers, make_example, pin_kv_caches, pin_read_weights
from fxsplit.ir.facts.capture.call import Call
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.graph import IR
from tests.support.models import FAST
from tests.support.text_models import make_prompt, make_text_model
from tests.support.times import draw_times

WIDTH, LAYERS = 8, 4


class Steps(nn.Module):
    """Each layer attends to its earlier inputs; the first layer's weight may also be the last layer's."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.tied = tied

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        for slot, layer in enumerate(self.layers):
            every = torch.ops.fxsplit.extend(layer(x).unsqueeze(1), seen.shape[1], slot)
            x = x + torch.tanh(every.mean(2))
        return x @ self.layers[0].weight if self.tied else x  # type: ignore[operator]


EXAMPLE = {"x": torch.randn(4, 1, WIDTH), "seen": torch.ones(4, 5)}


def test_steps_keep_what_they_keep_on_the_same_stages() -> None:
    model = Steps().eval()
    with fxsplit.compile(model, 3, example_inputs=EXAMPLE, passes=FAST, inference=True) as pipe:
        program = pipe.compiler.program("eval", Call((), EXAMPLE))
        pins = pin_kv_caches(pipe.traced, program)
        stage_of = program.plan.stage_of()
        # Each layer's node, and nothing else, is pinned to its place in the plan.
        slots = [n.name for n in pipe.traced.gm.graph.nodes if "extend" in n.name]
        assert len(slots) == LAYERS and pins.stages == {name: stage_of[name] for name in slots}


def test_another_compiler_is_told_where_to_put_things() -> None:
    """Everything is on the last device, which no plan of its own would choose."""
    model = Steps().eval()
    pinned: list[IR] = []

    def pin(captured: IR) -> IR:
        pinned.append(captured)
        names = [n.name for n in captured.gm.graph.nodes if n.op == "call_module"]
        return captured.learn(Pins(dict.fromkeys(names, 1)))

    with fxsplit.compile(model, 2, passes=FAST, inference=True) as pipe:
        compiler = Compiler(model, pipe.compiler.options)
        compiler.pin = pin
        program = compiler.program("eval", Call((), EXAMPLE))
    assert len(pinned) == 1
    assert [len(list(stage.module.parameters())) for stage in program.stages.stages] == [0, 2 * LAYERS]


def test_a_weight_that_is_read_more_often_is_not_pinned() -> None:
    """An encoder reads the embedding once, and a decoder reads it again in its last layer."""
    with fxsplit.compile(Steps().eval(), 2, example_inputs=EXAMPLE, passes=FAST, inference=True) as pipe:
        program, model = pipe.compiler.program("eval", Call((), EXAMPLE)), pipe.model
        model.tied = True  # type: ignore[assignment]
        with fxsplit.compile(model, 2, example_inputs=EXAMPLE, passes=FAST, inference=True) as tied:
            found = pin_read_weights(tied.traced, [program]).stages
            assert {"layers_1", "layers_2", "layers_3"} <= set(found) and "layers_0" not in found
            assert "layers_0" in pin_read_weights(pipe.traced, [program]).stages


def test_readers_are_counted_by_memory() -> None:
    layer = nn.Linear(2, 2)
    gm = fx.symbolic_trace(nn.Sequential(layer, nn.Tanh(), layer))
    assert sorted(count_readers([gm, gm]).values()) == [4, 4]


def test_the_example_of_a_next_step_is_as_long_as_a_text_may_be() -> None:
    ids, mask = torch.arange(12).view(2, 6), torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6])
    made = make_example({"input_ids": ids, "attention_mask": mask, "position_ids": ids + 1}, 20)
    assert made["input_ids"].tolist() == [[5], [11]] and made["position_ids"].tolist() == [[6], [12]]
    assert torch.equal(made["attention_mask"], torch.ones(2, 20, dtype=torch.long))
    given = {"decoder_input_ids": ids, "decoder_attention_mask": mask, "attention_mask": mask, "encoded": ids}
    made = make_example(given, 1)
    assert set(made) == {"decoder_input_ids", "decoder_attention_mask", "attention_mask"}
    assert made["decoder_attention_mask"].shape == (2, 4) and made["attention_mask"] is mask


@pytest.mark.long  # in an environment with transformers
def test_a_first_step_has_a_plan_wherever_the_next_step_has_cut() -> None:
    """The masks of few layers make more ideals than are enumerated, and pins follow the order of devices."""
    draw_times(Random(1))
    model = make_text_model("gpt_neo")
    prompt = make_prompt(model, rows=2, length=5)
    expected = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    for _ in range(4):
        with fxsplit.compile(model, 2, inference=True) as pipe:
            assert torch.equal(pipe.generate(**prompt, max_new_tokens=4, do_sample=False), expected)
