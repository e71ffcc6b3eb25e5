"""A forward graph and its backward, from one call of the backend, and who runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from torch import nn

from hytrain_fx.capture.captured_graph import CompiledGraph
from hytrain_fx.capture.casts import InputCopies, with_copies
from hytrain_fx.capture.instance_graphs import Instance
from hytrain_fx.torch_private import tensors

R = TypeVar("R")


@dataclass
class Pair(Generic[R]):
    """What a forward graph leaves for its backward graph.

    These are the rows of the example inputs, and saved views by output name. And both, once
    compiled, with the sets of parameters that run them, those that they were compiled for first.
    """

    row_of_input: dict[int, int]
    instances: list[Instance]
    saved_views: dict[str, int] = field(default_factory=dict)
    graphs: list[CompiledGraph[R]] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.instances[0].pair


class Runs(Protocol):
    """What calls a compiled function for a set of parameters."""

    def run(self, instance: Instance, compiled: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Its results."""


@dataclass(frozen=True)
class PairGraphs(Generic[R]):
    """What runs a pair with one set of parameters. It does not keep the capture alive."""

    alive: Callable[[], Runs]
    pair: Pair[R]
    instance: Instance
    compiled: Callable[..., Any]
    copies: InputCopies | None

    @cached_property
    def _call(self) -> Callable[..., Any]:
        return self.compiled if self.copies is None else with_copies(self.compiled, self.copies)

    def __call__(self, *inputs: Any) -> Any:
        return self.alive().run(self.instance, self._call, inputs)

    def reads_like(self, copies: InputCopies | None) -> bool:
        """Whether a set with these copies reads copies in the same places."""
        own, other = (() if of is None else tuple(of.copies) for of in (self.copies, copies))
        return own == other


def has_user_hooks(parameter: nn.Parameter) -> bool:
    """Whether a gradient hook that is not this library's own is registered on the parameter."""
    own = __name__.partition(".")[0]
    return any((getattr(hook, "__module__", None) or "").partition(".")[0] != own for hook in tensors.gradient_hooks(parameter))
