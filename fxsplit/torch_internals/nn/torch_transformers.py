"""Capture torch's own transformers without the data-dependent branches that only select faster kernels.

`nn.TransformerEncoder` and `nn.TransformerDecoder` read a mask's values to detect the causal mask, for which there are
faster kernels. In a graph the mask is applied as given, which is equal up to rounding. In evaluation without gradients,
the encoder packs rows that are padded at the end, and fills its output with zeros there. A graph writes these zeros
instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import transformer

from fxsplit.torch_internals.scopes.patch import Method, patch_method

ENCODE = nn.TransformerEncoder.forward.__code__
"""The code of the forward() that packs rows."""


@contextmanager
def take_masks_as_given() -> Iterator[None]:
    """Inside the block, make torch's transformers apply masks as given, without checking whether they are causal.

    The causal kernels ignore the mask, so a mask that requires grad would get no gradient from them.
    """
    with patch_method(transformer, "_detect_is_causal_mask", lambda own: _take_as_given):
        yield


@contextmanager
def ask_no_values() -> Iterator[None]:
    """Inside the block, make torch's transformers never branch on tensor values, so that they can be traced."""
    with take_masks_as_given(), patch_method(nn.TransformerEncoder, "forward", lambda own: partial(_encode, own)):
        yield


def may_pack(encoder: Any, mask: Any, padding: Any) -> bool:
    """Return whether an encoder would pack rows, in a call without gradients and with padding at the end."""
    first = encoder.layers[0]
    given = mask is None and padding is not None and not first.training
    return given and bool(getattr(encoder, "use_nested_tensor", False) and getattr(encoder, "mask_check", True))


def _take_as_given(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return whether the caller declared a mask causal."""
    return is_causal is True


def _encode(
    own: Method,
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Any:
    """Run the encoder. If it would pack rows, write zeros at their padding instead."""
    padding = src_key_padding_mask
    if padding is None or not may_pack(encoder, mask, padding) or not _packs_now(encoder, src):
        return own(encoder, src, mask, padding, is_causal)
    # As the encoder itself reads it: positions to which a float mask adds 0 are kept.
    added = F._canonical_mask(padding, "src_key_padding_mask", None, "", src.dtype, check_other=False)
    assert added is not None, "there is padding"
    output = src
    for layer in encoder.layers:
        output = layer(output, src_mask=None, is_causal=False, src_key_padding_mask=added)
    keeps = added.logical_not()
    at_the_end = (keeps[:, 1:] <= keeps[:, :-1]).all()
    output = output.masked_fill((~keeps & at_the_end).unsqueeze(-1), 0.0)
    return output if encoder.norm is None else encoder.norm(output)


def _packs_now(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Return whether the encoder would pack rows in the current modes, by torch's own conditions."""
    if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled() or src.dim() != 3:
        return False
    return not (torch.is_grad_enabled() and any(w.requires_grad for w in encoder.layers[0].parameters()))
