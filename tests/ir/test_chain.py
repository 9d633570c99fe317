"""Chains of passes: written as text, and read back."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import fxsplit
from fxsplit import DEFAULT, IR
from fxsplit.errors import ChainError, MissingFact
from fxsplit.ir import chain as spec
from fxsplit.passes import Profile
from tests.support.models import FAST, Residual
from tests.support.own_passes import Keep, fold_conv_bn


def x() -> torch.Tensor:
    return torch.randn(8, 3, 8, 8)


OWN = "tests.support.own_passes"


def test_chain_text_round_trip() -> None:
    from fxsplit.passes import PASSES

    for text in (FAST, "profile,augment{max_states=10},order,partition{use_all=false,optimizer_factor=0.5},emit"):
        assert str(spec.parse_chain(text, PASSES)) == text
    assert str(DEFAULT) == "profile,augment,order,partition,emit,batch-norm"
    assert (
        str(DEFAULT.after("order", Keep("a")))
        == f"profile,augment,order,{OWN}:Keep{{module=a}},partition,emit,batch-norm"
    )
    assert (
        str(DEFAULT.replace("partition", fold_conv_bn)) == f"profile,augment,order,{OWN}:fold_conv_bn,emit,batch-norm"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profile,augmnet", "unknown pass 'augmnet': .*; did you mean 'augment'"),
        ("profile{repeat=3}", "pass 'profile' has no option 'repeat': it has repeats"),
        ("profile{repeats=x}", "option repeats='x' of pass 'profile': write a whole number"),
        ("partition{use_all=1}", "option use_all='1' of pass 'partition': write true or false"),
        ("profile{repeats=0}", "measure at least once"),
        ("augment{max_states=0}", "give a positive number"),
        ("partition{optimizer_factor=-1}", "zero or more"),
        ("profile{repeats=3", "cannot read the chain"),
        ("", "an empty chain"),
        ("no.such.module:Pass", "cannot import the pass"),
    ],
)
def test_bad_chain_text(text: str, message: str) -> None:
    with pytest.raises(ChainError, match=message.replace("{", r"\{")):
        fxsplit.compile(Residual(), 2, passes=text)


def test_bad_chains() -> None:
    with pytest.raises(ChainError, match="no pass 'cut' in this chain"):
        DEFAULT.before("cut", Keep("a"))
    with pytest.raises(ChainError, match="is not a pass: give a function"):
        fxsplit.compile(Residual(), 2, passes=[Keep])  # type: ignore[list-item]
    with pytest.raises(ChainError, match="pass '<lambda>' returned NoneType: a pass returns an IR"):
        fxsplit.compile(Residual(), 2, example_inputs=x(), passes=[lambda ir: None])  # type: ignore[list-item, return-value]
    with pytest.raises(MissingFact, match=r"no Stages yet.*run 'emit' earlier in the chain"):
        fxsplit.compile(Residual(), 2, example_inputs=x(), passes="profile{repeats=1},augment,order,partition")
    with pytest.raises(MissingFact, match=r"no States yet.*run 'order' earlier in the chain"):
        fxsplit.compile(Residual(), 2, example_inputs=x(), passes="profile{repeats=1},augment,partition,emit")


def test_a_fact_that_a_rewrite_forgot_is_not_said_to_be_unlearnt() -> None:
    # The message used to say "run 'partition' earlier in the chain", although it had run, and was no ChainError.
    def copy(ir: IR) -> IR:
        return ir.rewrite(fx.GraphModule(ir.gm, ir.gm.graph))

    chain = DEFAULT.replace("profile", Profile(repeats=1))
    with pytest.raises(
        ChainError, match=r"no Plan any more .*the facts of 'partition' were forgotten.*rewrite\(gm, Plan\)"
    ):
        fxsplit.compile(Residual(), 2, example_inputs=x(), passes=chain.after("emit", copy))
    with pytest.raises(ChainError, match=r"no Costs any more .*rewrite it before 'profile'"):
        fxsplit.compile(Residual(), 2, example_inputs=x(), passes=chain.after("profile", copy))
