"""The order of Inductor's kernels after fusion: the graph's, each kernel once its inputs are made.

Inductor puts a fused kernel where the first of its parts stands in the graph, and before it all
that its other parts need:

    graph       bwd 2   sum 2   offload 2   bwd 1   sum 1   offload 1   bwd 0   sum 0   offload 0
    Inductor    bwd 2   bwd 1   bwd 0   [sum 2, 1, 0]   offload 2   offload 1   offload 0
    here        bwd 2   offload 2   bwd 1   offload 1   bwd 0   [sum 2, 1, 0]   offload 0

A sum over layers is such a kernel: the gradient of what all of them read, as DiT's condition or
T5's bias of positions. What is fused is Inductor's choice and stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.torch_private.names import private_name

_PASSES = "torch._inductor.custom_graph_pass"
try:
    _Base: Any = private_name(_PASSES, "CustomSchedulerPass")
except UnsupportedError:  # torch 2.11 takes any callable, and has it in its cache's key by its class and attributes
    _Base = object


class ScheduledNode(Protocol):
    """What is read of a node of Inductor's scheduler.

    min_order              position of its first part before fusion
    unmet_dependencies     with the `name` of each buffer that it needs
    get_buffer_names       of what it makes
    """

    @property
    def min_order(self) -> int: ...
    @property
    def unmet_dependencies(self) -> Any: ...
    def get_buffer_names(self) -> Any: ...


Node = TypeVar("Node", bound=ScheduledNode)


class LaunchOrder(_Base):  # type: ignore[misc]
    """Inductor's `_post_fusion_custom_pass`."""

    def __init__(self) -> None:
        self.version = private_name(_PASSES, "get_hash_for_files")((__file__,))

    def __call__(self, nodes: Sequence[Node]) -> list[Node]:
        """Raises UnsupportedError where nodes of this torch are other ones."""
        try:
            return in_graph_order(nodes)
        except AttributeError as error:
            raise UnsupportedError(f"the nodes of Inductor's scheduler in torch {torch.__version__} are not as expected ({error}); "
                                   "hytrain_fx needs them and was run on torch 2.11 and 2.13") from None

    def uuid(self) -> Any:
        """Of these instructions, for Inductor's cache."""
        return self.version


def in_graph_order(nodes: Sequence[Node]) -> list[Node]:
    """`nodes`, which are in a valid order, in the one of the module's docstring.

    Each comes at its first part's place in the graph, or at the place of the last node that it
    waits for, if that is later.
    """
    maker: dict[str, Node] = {}
    place: dict[int, int] = {}
    for node in nodes:
        needed = [maker[of.name] for of in node.unmet_dependencies if of.name in maker]
        place[id(node)] = max([node.min_order, *(place[id(of)] for of in needed)])
        maker.update(dict.fromkeys(node.get_buffer_names(), node))
    return sorted(nodes, key=lambda node: place[id(node)])  # stable: a node stays behind what it needs
