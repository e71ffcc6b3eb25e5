"""Keys of what a step reads: those of equal keys are recorded once.

    values_of    of options and attributes: a step may read every number in them
    entry_of     of a state: its scalars count, and of a tensor that rests with the row its form
    kinds_of     of either, without numbers: these say whether the step can be recorded
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from hytrain_fx.runtime.any_optimizer.recording import Form
from hytrain_fx.runtime.any_optimizer.shell import may_change_unseen
from hytrain_fx.runtime.own_states import Entry, frozen, is_scalar, map_leaves

_FEW_BYTES = 1024  # more of a tensor are not kept in a key, only their hash


def values_of(values: Mapping[str, Any]) -> Hashable:
    """Equal for equal values; where they cannot be compared, equal to nothing."""
    try:
        return frozen(map_leaves(values, _read))
    except TypeError:
        return object()


def entry_of(entry: Entry | None) -> Hashable:
    """Equal for entries with the same scalars and tensors of the same forms.

    Raises TypeError for what cannot be compared.
    """

    def of_leaf(leaf: Any) -> Any:
        if is_scalar(leaf):
            return leaf.dtype, leaf.item()
        return _form(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return frozen(map_leaves(entry, of_leaf))


def kinds_of(values: Mapping[str, Any] | None) -> Hashable:
    """Equal for values of the same types, and tensors of the same forms.

    Raises TypeError for what cannot be compared.
    """
    return frozen(map_leaves(values, lambda leaf: _form(leaf) if isinstance(leaf, torch.Tensor) else type(leaf)))


def _read(leaf: Any) -> Any:
    """What a step can read in a leaf. Raises TypeError where that may change unseen."""
    if isinstance(leaf, torch.Tensor):
        return _numbers(leaf)
    if isinstance(leaf, tuple):  # of a class of its own
        return type(leaf), frozen(map_leaves(tuple(leaf), _read))
    if may_change_unseen(leaf):
        raise TypeError(f"a {type(leaf).__name__} is compared by its identity, and its attributes may change")
    return leaf


def _form(tensor: torch.Tensor) -> Hashable:
    return (tensor.dtype, None) if is_scalar(tensor) else (Form.of(tensor), tensor.dtype)


def _numbers(tensor: torch.Tensor) -> Hashable:
    """Its form and every bit of it. Raises TypeError for one without memory on the CPU."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise TypeError(f"a {type(tensor).__name__} of layout {tensor.layout} on the {tensor.device.type} cannot be compared")
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    held = flat.view(torch.uint8).numpy().tobytes()
    return _form(tensor), held if len(held) <= _FEW_BYTES else hashlib.sha256(held).digest()
