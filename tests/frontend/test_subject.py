"""Subject: a model and its call, and how both run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxsplit.errors import TraceError
from tests.frontend.subjects import Scale, make_subject, trace


def test_rows_are_the_first_ones_and_doubled_where_there_are_too_few() -> None:
    subject = make_subject(Scale(), rows=3)
    assert subject.batch == 6 and subject.is_cut and not make_subject(Scale()).is_cut
    (two,) = subject.take_rows(2)
    assert torch.equal(two, subject.tensors[0][:2])
    single = make_subject(Scale(), torch.ones(1, 4))
    assert [t.shape for t in single.take_rows(2)] == [(2, 4)] and len(single.take_rows(1)[0]) == 1


def test_model_and_graph_run_beside_each_other_on_the_same_weights() -> None:
    model = Scale()
    with make_subject(model).make_runnable(2, trace(model)) as here:
        assert here.model is model and here.rows == 2 and here.name == "Scale"
        x = torch.ones(2, 4)
        assert torch.equal(here.run_model(x), here.graph(x)) and torch.equal(here.run_model(x), 2 * x)
        assert [len(t) for t in here.clone_doubled()] == [4]
        here.clone_tensors()[0].zero_()
        assert here.tensors[0].any(), "a clone is written to, and not the rows"


def test_from_shapes_the_weights_are_stand_ins_for_the_block_alone() -> None:
    model = Scale()
    own = model.scale
    with make_subject(model, from_shapes=True).make_runnable(2) as here:
        assert here.run_model(*here.tensors).shape == (2, 4) and model.scale is not own
    assert model.scale is own


def test_a_path_of_no_submodule_is_refused_by_name() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scale()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    make_subject(Holds(), whole=("inner",)).check_whole()
    for path in ("innner", ""):
        with pytest.raises(TraceError, match=rf"leaf\('{path}'\): Holds has no such submodule; it has inner"):
            make_subject(Holds(), whole=("inner", path)).check_whole()
