"""Which fp32 weights a traced graph reads in bf16 only.

A bf16 copy instead of such a weight changes no bit.

    primals_5: f32[16, 8]
    cast: bf16[16, 8] = convert_element_type(primals_5, bfloat16)      its one reader
    mm(..., permute(cast)), mm(..., cast)         calls: they read rounded values, whatever is fused
    grad: f32[16, 8] = convert_element_type(permute(mm_9), float32)    one bf16 result, widened

Two casts of one weight have two gradients that are added in fp32. A cast that a pointwise kernel
reads (a bias), or a gradient that one makes, is never rounded to bf16 there: Inductor computes such
kernels in fp32. All of these stay unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hytrain_fx.capture import dataflow
from hytrain_fx.torch_private.compiling import gradient_of, plain_input

_CASTS = frozenset({torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default})
_MAKERS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.convolution_backward.default})


@dataclass(frozen=True, slots=True)
class CastRows:
    """For the rows that are inputs of one graph.

    in_bf16    read through one cast to bf16 alone; with a gradient that is a widened bf16 result,
               or none
    trained    rows whose gradient the graph makes
    """

    in_bf16: frozenset[int]
    trained: frozenset[int]


def cast_rows(graph: fx.GraphModule, row_of_input: Mapping[int, int]) -> CastRows:
    """Look at a forward graph, or at forward and backward in one.

    `row_of_input` goes by position among the inputs.
    """
    holders = {plain_input(node.meta.get("desc")): node for node in graph.graph.find_nodes(op="placeholder")}
    output = graph.graph.output_node()
    grads = _gradients(output)
    times = Counter(row_of_input.values())
    found = {row: holders[index] for index, row in row_of_input.items() if index in holders and times[row] == 1}
    makes = {row: grads[index] for index, row in row_of_input.items() if index in grads}
    in_bf16 = (row for row, node in found.items() if _read_in_bf16(node, once=row in makes) and _is_widened(makes.get(row), output))
    return CastRows(frozenset(in_bf16), frozenset(makes))


def _gradients(output: fx.Node) -> dict[int, fx.Node]:
    values, descs = fx.node.map_arg(output.args[0], lambda node: node), output.meta.get("desc")
    flat = values if isinstance(values, (list, tuple)) else (values,)
    pairs = zip(flat, descs, strict=True) if descs is not None and len(descs) == len(flat) else ()
    return {index: value for value, desc in pairs if (index := gradient_of(desc)) is not None and isinstance(value, fx.Node)}


def _read_in_bf16(holder: fx.Node, *, once: bool) -> bool:
    casts = tuple(holder.users)
    if not casts or (once and len(casts) > 1):
        return False
    return all(_is_cast(cast, torch.bfloat16) and dataflow.standalone_readers([cast]) is not None for cast in casts)


def _is_widened(grad: fx.Node | None, output: fx.Node) -> bool:
    """Whether a gradient is a call's bf16 result, widened for nobody else; None is no gradient."""
    if grad is None:
        return True
    if not _is_cast(grad, torch.float32) or tuple(grad.users) != (output,):
        return False
    made = grad.all_input_nodes[0]
    return made.meta["val"].dtype == torch.bfloat16 and dataflow.view_base(made).target in _MAKERS


def _is_cast(node: fx.Node, dtype: torch.dtype) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and node.target in _CASTS and isinstance(value, torch.Tensor) and value.dtype == dtype


# ---- A graph traced with bf16 copies, called with the fp32 parameters that Dynamo knows ----
#
#     run([x, p0, p1])  ->  graph([x, q0, p1])        q0 comes after p0 in autograd's graph
#
# Autograd finds the parameters where it looks for them: accumulation, hooks and torch.autograd.grad
# see p0. A gradient that comes back for q0 is widened, which is exact. Gradients that our nodes
# take come back as None.


class _Copies(torch.autograd.Function):
    """Parameters in, their copies out."""

    @staticmethod
    def forward(ctx: Any, copies: Sequence[torch.Tensor], *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        # A copy shares the version counter, so whoever saves one learns when it was updated.
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *(None if grad is None else grad.float() for grad in grads))


@dataclass(frozen=True, slots=True)
class InputCopies:
    """The bf16 copies that one graph reads instead of fp32 parameters among its inputs.

    copies    by position among the inputs, as the graph is traced
    now       runs before each call of the graph, and gives them in this order; also of a graph that
              reads none
    """

    copies: Mapping[int, torch.Tensor]
    now: Callable[[], Sequence[torch.Tensor]]


def with_copies(compiled: Callable[..., Any], read: InputCopies) -> Callable[..., Any]:
    """What a torch.compile backend has made, called with copies instead of parameters.

    The call itself holds no copies.
    """
    positions, copies_now = tuple(read.copies), read.now

    def exchanged(args: Sequence[Any]) -> list[Any]:
        copies = copies_now()
        given = list(args)
        if not positions:
            return given
        learns = torch.is_grad_enabled()
        linked = [i for i, position in enumerate(positions) if learns and given[position].requires_grad]
        behind = dict(enumerate(copies))
        if linked:
            behind.update(zip(linked, _Copies.apply([copies[i] for i in linked], *(given[positions[i]] for i in linked)), strict=True))  # type: ignore[no-untyped-call]
        for i, position in enumerate(positions):
            given[position] = behind[i]
        return given

    return lambda *args: compiled(*exchanged(args))
