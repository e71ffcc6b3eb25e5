"""Who reads a weight in an FX graph, and what runs before what.

An alias of a weight is its placeholder or a view of it. A reader is a node that is no view and
takes an alias. A reader *stands alone* where Inductor runs it as a call of its own: once its result
exists, the weight has been read. A pointwise reader does not: Inductor may inline it into any later
kernel. Casts and paddings whose only readers stand alone are seen through, since a call's operands
are made before the call.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from hytrain_fx.torch_private import operators

aten = torch.ops.aten

# Operand positions that are read by the call itself. The bias of addmm or of a convolution is not
# among them: Inductor may add it later.
_STANDALONE: dict[object, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.convolution.default: (0, 1),
    aten.convolution_backward.default: (0, 1, 2),
    aten._scaled_dot_product_flash_attention.default: (0, 1, 2),
    aten._scaled_dot_product_efficient_attention.default: (0, 1, 2),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 1, 2),
}
_COPIES = frozenset(
    {torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.clone.default, aten.constant_pad_nd.default}
)
_UNMARKED_VIEWS = frozenset({aten._unsafe_view.default, operator.getitem})


def is_view(node: fx.Node) -> bool:
    """Whether the node's result shares its first operand's memory, by the schema's alias marks."""
    if node.op != "call_function":
        return False
    if node.target in _UNMARKED_VIEWS:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def mutates(node: fx.Node) -> bool:
    """Whether the node writes to one of its operands, by the schema's alias marks."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return schema is not None and any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


def view_base(node: fx.Node) -> fx.Node:
    """The node whose memory `node` shares: itself, or what its chain of views starts from."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def aliases(roots: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """`roots` and every view of them."""
    found = dict.fromkeys(roots)
    queue = list(found)
    while queue:
        for user in queue.pop().users:
            if user not in found and is_view(user):
                found[user] = None
                queue.append(user)
    return tuple(found)


def readers(roots: Iterable[fx.Node], ignore: frozenset[object] = frozenset()) -> tuple[fx.Node, ...]:
    """Nodes that are not views and take an alias of `roots`, in no order.

    The output node counts; targets in `ignore` do not.
    """
    found: dict[fx.Node, None] = {}
    for alias in aliases(roots):
        found.update(dict.fromkeys(u for u in alias.users if not is_view(u) and u.target not in ignore))
    return tuple(found)


def standalone_readers(roots: Iterable[fx.Node], ignore: frozenset[object] = frozenset()) -> tuple[fx.Node, ...] | None:
    """The calls whose results show that `roots` have been read.

    None where a reader may be inlined into a later kernel.
    """
    found: dict[fx.Node, None] = {}
    queue = list(roots)
    while queue:
        alias_set = set(aliases([queue.pop()]))
        for reader in readers(alias_set, ignore):
            if reader.target in _COPIES and reader.users:
                queue.append(reader)
            elif _stands_alone(reader, alias_set):
                found[reader] = None
            else:
                return None
    return tuple(found)


def result_tensor(node: fx.Node) -> fx.Node | None:
    """A node that holds a tensor made by `node`: itself, or an item of its tuple; else None."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return node
    items = (u for u in node.users if u.target is operator.getitem and isinstance(u.meta.get("val"), torch.Tensor))
    return next(items, None)


@dataclass(frozen=True)
class ProductsAndSums:
    """What Inductor makes of the products and sums of a graph, at the end of its `post_grad.py`.

    From the graph's end on it joins an `add` with an `mm` that nobody else reads, which rounds once
    instead of twice (`addmm`). On a GPU not where all that reads the sum is pointwise. There it
    takes an `addmm` apart, and not in 16 bits (`unfuse_bias_add_to_pointwise`). A sum that was
    joined is not pointwise any more. Who reads a product needs to leave it the same choice: another
    kernel has other last bits.

    sums    by product: the sum that it computes in one call with it
    apart   each `addmm` of which it makes a product and a sum
    """

    sums: dict[fx.Node, fx.Node]
    apart: frozenset[fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph, ignore: frozenset[object] = frozenset()) -> ProductsAndSums:
        """Of a graph as it is now. `ignore`: targets that count as no readers."""
        sums, apart, joined = dict[fx.Node, fx.Node](), set[fx.Node](), set[fx.Node]()

        def is_pointwise(reader: fx.Node, node: fx.Node) -> bool:
            if is_view(reader) or _copies_nothing(reader):
                return all_pointwise(reader)
            if reader in apart:
                return node not in reader.args[1:]  # the sum reads it, the product does not
            return reader not in joined and _is_pointwise(reader)

        def all_pointwise(node: fx.Node) -> bool:
            return all(is_pointwise(reader, node) for reader in node.users if reader.target not in ignore)

        for node in reversed(graph.nodes):
            if node.target is aten.addmm.default and _may_part(node) and all_pointwise(node):
                apart.add(node)
            elif node.target is aten.add.Tensor and not node.kwargs:
                products = [product for product in node.all_input_nodes if _may_join(product, node, ignore)]
                if products and (node.meta["val"].device.type == "cpu" or not all_pointwise(node)):
                    joined.add(node)
                    sums.update(dict.fromkeys(products, node))
        return cls(sums, frozenset(apart))


def _may_part(product: fx.Node) -> bool:
    value = product.meta["val"]
    return value.device.type != "cpu" and value.dtype not in (torch.bfloat16, torch.float16)


def _may_join(product: fx.Node, total: fx.Node, ignore: frozenset[object]) -> bool:
    """Whether the other operand fits an `addmm`: a tensor of this dtype that is no larger."""
    if product.target is not aten.mm.default or len(total.all_input_nodes) != 2:
        return False
    if any(user is not total and user.target not in ignore for user in product.users):
        return False
    values = [node.meta.get("val") for node in total.all_input_nodes]
    if not all(isinstance(value, torch.Tensor) and value.dtype == product.meta["val"].dtype for value in values):
        return False
    return tuple(total.meta["val"].shape) == tuple(product.meta["val"].shape)


def _copies_nothing(node: fx.Node) -> bool:
    """Whether Inductor leaves this `clone` out, before it looks at products."""
    if node.target is not aten.clone.default:
        return False
    made, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return made.dtype == source.dtype and tuple(made.shape) == tuple(source.shape) and tuple(made.stride()) == tuple(source.stride())


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _stands_alone(node: fx.Node, alias_set: set[fx.Node]) -> bool:
    positions = _STANDALONE.get(node.target)
    if positions is None or any(kw in alias_set for kw in node.kwargs.values() if isinstance(kw, fx.Node)):
        return False
    inside = {i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg in alias_set}
    return inside <= set(positions) and result_tensor(node) is not None


@dataclass(frozen=True)
class Order:
    """Positions and ancestors of a graph's nodes, taken once.

    `ancestors[n]` is a bit set over positions, `n` itself included.
    """

    position: dict[fx.Node, int]
    ancestors: dict[fx.Node, int]

    @classmethod
    def of(cls, graph: fx.Graph) -> Order:
        """Take the order of a graph as it is now."""
        position: dict[fx.Node, int] = {}
        masks: dict[fx.Node, int] = {}
        for index, node in enumerate(graph.nodes):
            mask = 1 << index
            for source in node.all_input_nodes:
                mask |= masks[source]
            position[node], masks[node] = index, mask
        return cls(position, masks)

    def reaches(self, early: fx.Node, late: fx.Node) -> bool:
        """Whether `late` is `early` or needs its result, over any number of nodes."""
        return bool(self.ancestors[late] >> self.position[early] & 1)

    def reached_from(self, early: Iterable[fx.Node]) -> frozenset[fx.Node]:
        """The nodes that are one of `early` or need the result of one."""
        wanted = functools.reduce(operator.or_, (1 << self.position[node] for node in early), 0)
        return frozenset(node for node, mask in self.ancestors.items() if mask & wanted)

    def frontier(self, nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """The fewest of `nodes` whose ancestors include all of them, in graph order."""
        kept: list[fx.Node] = []
        for node in sorted(nodes, key=self.position.__getitem__, reverse=True):
            if not any(self.reaches(node, later) for later in kept):
                kept.append(node)
        return tuple(reversed(kept))


# ---- Floating-point operations of one FX node, from the shapes in `meta["val"]` ----


def node_flops(node: fx.Node) -> float:
    """FLOPs of a node (a multiply-add is two); 0 for ops without a formula: memory bounds them.

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
    """A meta tensor of the traced shape for a node; a plain number for a symbolic one."""
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_traced(v) for v in value)
    if isinstance(value, torch.Tensor):
        return torch.empty([operators.size_hint(s) for s in value.shape], dtype=value.dtype, device="meta")
    return operators.size_hint(value) if isinstance(value, torch.SymInt) else value
