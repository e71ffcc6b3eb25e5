"""Floating-point operations of one FX node, by the formulas of `torch.utils.flop_counter` on the shapes in `meta["val"]`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from hytrain_fx.torch_private import tensors


def node_flops(node: fx.Node) -> float:
    """FLOPs of a node (a multiply-add is two); 0 for ops without a formula: they are bound by memory.

    A symbolic size counts as the size it had while tracing.
    """
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0
    args = pytree.tree_map(_traced, list(node.args))
    kwargs = pytree.tree_map(_traced, dict(node.kwargs))
    return float(formula(*args, **kwargs, out_val=_traced(node)))


def _traced(value: Any) -> Any:
    """A meta tensor of the traced shape in place of a node; a plain number in place of a symbolic one."""
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_traced(v) for v in value)
    if isinstance(value, torch.Tensor):
        return torch.empty([tensors.size_hint(s) for s in value.shape], dtype=value.dtype, device="meta")
    return tensors.size_hint(value) if isinstance(value, torch.SymInt) else value
