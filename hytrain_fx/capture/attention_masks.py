"""Masks that attention is given although they say nothing of the batch.

A mask that is made in the graph, of no tensor that the graph is given and of no random numbers,
depends on positions alone, or on numbers of Python's: it is causal, or a window. torch's kernels
are told of a causal one by a flag, and are much faster so. transformers makes the mask all the same
where torch.compile traces a whole model with use_cache=False.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from hytrain_fx.capture.captured_graph import CompiledGraph


def masks_of_positions(graph: fx.Graph) -> int:
    """How many attention calls of a forward graph get such a mask."""
    masks = [mask for node in graph.nodes if (mask := _attention_mask(node)) is not None]
    if not masks:
        return 0
    of_inputs: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        given = node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
        of_inputs[node] = given or _is_random(node) or any(of_inputs[of] for of in node.all_input_nodes)
    return sum(not of_inputs[mask] for mask in masks)


def masks_in_words(graphs: Iterable[CompiledGraph[Any]]) -> str | None:
    """What to do about them, for `explain`; None where no graph has one."""
    calls = max((graph.masks_of_positions for graph in graphs), default=0)
    if not calls:
        return None
    return (f"attention gets a mask that depends on positions alone ({calls} calls in one forward graph). Where it is only causal, call "
            "scaled_dot_product_attention with is_causal=True and no mask: with one its kernel took 2.9 times as long on an H200 "
            "(docs/slow.md has what to write for transformers)")


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _attention_mask(node: fx.Node) -> fx.Node | None:
    """The mask, or bias, that an attention call gets."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    if schema is None or not schema.name.startswith("aten::_scaled_dot_product_"):
        return None
    at = next((i for i, of in enumerate(schema.arguments) if of.name in ("attn_mask", "attn_bias")), None)
    if at is None:
        return None
    mask = node.args[at] if at < len(node.args) else node.kwargs.get(schema.arguments[at].name)
    return mask if isinstance(mask, fx.Node) else None
