"""A forward graph and its backward, from one call of the backend, and who runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from hytrain_fx.capture.casts import InputCopies, with_copies
from hytrain_fx.capture.instance_graphs import Instance
from hytrain_fx.torch_private import tensors


@dataclass
class Pair:
    """What a forward graph leaves for its backward graph.

    These are the rows of the example inputs, and saved views by output name. And the numbers of
    both, once compiled, with the sets of parameters that run them, the one that they were compiled
    for first.
    """

    row_of_input: dict[int, int]
    instances: list[Instance]
    saved_views: dict[str, int] = field(default_factory=dict)
    graphs: list[int] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.instances[0].pair


class Runs(Protocol):
    """What calls a compiled function for a set of parameters."""

    def run(self, instance: Instance, compiled: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Its results."""


class PairGraphs:
    """What runs a pair with one set of parameters.

    torch keeps it for as long as the compiled code lives: it holds neither the capture nor copies.

    copies    that this set has among its inputs
    """

    def __init__(
        self, alive: Callable[[], Runs], pair: Pair, instance: Instance, compiled: Callable[..., Any], copies: InputCopies | None
    ) -> None:
        self.pair = pair
        self._alive, self._compiled = alive, compiled
        self._copied = () if copies is None else tuple(copies.copies)

        def run(*inputs: Any) -> Any:
            return alive().run(instance, compiled, inputs)

        self._call = run if copies is None else with_copies(run, copies)

    def __call__(self, *inputs: Any) -> Any:
        return self._call(*inputs)

    def reads_like(self, copies: InputCopies | None) -> bool:
        """Whether a set with these copies reads copies in the same places."""
        return self._copied == (() if copies is None else tuple(copies.copies))

    def run_with(self, instance: Instance, copies: InputCopies | None) -> PairGraphs:
        """What runs the pair with another set."""
        return PairGraphs(self._alive, self.pair, instance, self._compiled, copies)


def has_user_hooks(parameter: nn.Parameter) -> bool:
    """Whether a gradient hook that is not this library's own is registered on the parameter."""
    own = __name__.partition(".")[0]
    return any((getattr(hook, "__module__", None) or "").partition(".")[0] != own for hook in tensors.gradient_hooks(parameter))
