"""What is private of the backward that runs.

Its number, its node, its end, and what it does with each leaf's gradient. And who is given what a
forward saves for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable
from enum import Enum
from functools import cache
from typing import Any, cast

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter

from hytrain_fx.torch_private.names import private_name
from hytrain_fx.torch_private.tensors import without_torch_function


class LeafGradient(Enum):
    """What the running backward does with the gradient of a leaf."""

    ACCUMULATED = "added to .grad"
    RETURNED = "handed to the caller of torch.autograd.grad"
    UNWANTED = "not among the inputs that were asked for"


def accumulator(leaf: Tensor) -> Node:
    """The AccumulateGrad node of a leaf: one and the same for as long as somebody holds it."""
    with without_torch_function():
        return get_gradient_edge(leaf).node


def accumulators_behind() -> dict[int, Node]:
    """The AccumulateGrad nodes that the running node leads to, by the `id` of their leaf.

    A leaf that was given other memory since (`set_`, also of `p.data = ...` in a graph) has another
    one by now, which is in no graph.
    """
    if running_backward() == -1:
        return {}
    return {id(node.variable): node for node, _ in running_node().next_functions if node is not None and hasattr(node, "variable")}


def will_all_accumulate(accumulators: Iterable[Node]) -> bool:
    """Whether the backward that runs on this thread runs all of these.

    True outside of a backward.
    """
    if running_backward() == -1:
        return True
    try:
        return all(map(_will_run(), accumulators))
    except RuntimeError:  # of torch.autograd.grad
        return False


def leaf_gradient(accumulator: Node) -> LeafGradient:
    """What the backward that runs on this thread does with this leaf's gradient."""
    try:
        runs = _will_run()(accumulator)
    except RuntimeError:  # its way to say that a leaf's gradient is captured
        return LeafGradient.RETURNED
    return LeafGradient.ACCUMULATED if runs else LeafGradient.UNWANTED


def running_backward() -> int:
    """Which backward runs on this thread: a number of its own, -1 outside of one."""
    return int(_graph_task_id()())


def running_node() -> Node:
    """The node that the backward on this thread runs."""
    return _current_node()()


def nodes_of(values: Iterable[Any]) -> list[Node]:
    """Autograd's nodes that have made these values; of parameters none.

    Of a view those of its base too: once the view is written in place, its node leads there.
    """
    tensors = (value for value in values if isinstance(value, Tensor) and not isinstance(value, Parameter))
    bases = (of for tensor in tensors for of in (tensor, tensor._base) if of is not None)
    return [node for tensor in bases if (node := tensor.grad_fn) is not None]


def node_of_call(results: Iterable[Any], inputs: Iterable[Any], before: Iterable[Node], others: Container[Node] = ()) -> Node | None:
    """The node that runs the backward of the compiled function that gave these results.

    It is one and the same, and lives as long as the graph. None where no gradient comes there.

    inputs    of the call, which it may have written in place
    before    `nodes_of` them before it: what these lead to is not of the call
    others    nodes of other calls, nor is theirs
    """
    seen = set(before)
    found: deque[Any] = deque((*nodes_of(results), *nodes_of(inputs)))
    while found:
        node = found.popleft()
        if node in seen or node in others:
            continue
        if isinstance(node, BackwardCFunction):
            return cast(Node, node)
        seen.add(node)  # of a view, or a copy, that torch has made of a result
        found += [earlier for earlier, _ in node.next_functions if earlier is not None]
    return None


def around_accumulation(leaf: Tensor, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Have these called around autograd's adding to this leaf's `.grad`.

    `before` is called only where there is something to add. Gives what ends it.
    """
    node = accumulator(leaf)
    handles = (node.register_prehook(lambda grads: None if grads[0] is None else before()), node.register_hook(lambda *_: after()))

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have `call` called when the backward that runs on this thread has added all gradients.

    It is not called where that ends in an error.
    """
    private_name("torch.autograd.variable", "Variable")._execution_engine.queue_callback(call)


def reading_save_hook() -> Callable[..., Any] | None:
    """What is called with each tensor that autograd saves in this thread now, and may read it.

    None where nothing is. Activation checkpointing keeps or drops a tensor, and reads none.
    """
    pair = _save_hooks()(False)
    return None if pair is None or getattr(pair[0], "__module__", None) == "torch.utils.checkpoint" else pair[0]


@cache  # every compiled forward asks for it
def _save_hooks() -> Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None]:
    found = private_name("torch._C._autograd", "_top_saved_tensors_default_hooks")
    return cast(Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None], found)


@cache  # every compiled backward asks for it
def _will_run() -> Callable[[Node], bool]:
    return cast(Callable[[Node], bool], private_name("torch._C", "_will_engine_execute_node"))


@cache  # every compiled backward asks for it
def _current_node() -> Callable[[], Node]:
    return cast(Callable[[], Node], private_name("torch._C", "_current_autograd_node"))


@cache  # every inserted node asks for it
def _graph_task_id() -> Callable[[], int]:
    return cast(Callable[[], int], private_name("torch._C", "_current_graph_task_id"))
