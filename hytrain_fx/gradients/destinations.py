"""Where autograd takes the gradients of the backward that runs.

To `.grad`, to the caller of torch.autograd.grad, or nowhere.

    loss.backward()                         every leaf's AccumulateGrad runs
    loss.backward(inputs=[a, b])            that of a and b alone: others get no gradient
    torch.autograd.grad(loss, [a, b])       none runs: the caller is handed those of a and b
    a frozen since the forward              its AccumulateGrad runs, and adds nothing

A compiled backward makes all its gradients whoever asked; autograd drops what nobody wants. What
goes around autograd must ask it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.autograd.graph import Node

from hytrain_fx.torch_private.autograd import LeafGradient, accumulator, accumulators_behind, leaf_gradient, will_all_accumulate
from hytrain_fx.torch_private.tensors import property_reader

_is_trained: Final = property_reader("requires_grad")


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Rows whose gradients the running backward does not add to `.grad`."""

    returned: frozenset[int] = frozenset()
    unwanted: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.returned or self.unwanted)


NOWHERE_ELSE = Elsewhere()


class GradDestinations:
    """Asks the running backward about the parameters of one session.

    0.15 us a row where all is as in `loss.backward()`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._known: dict[frozenset[int], _Leaves] = {}

    def elsewhere(self, rows: frozenset[int]) -> Elsewhere:
        """Which of `rows` get no `.grad` from the backward that runs on this thread.

        None of them outside of one.
        """
        known = self._known.get(rows)
        if known is not None and known.all_accumulate():
            return NOWHERE_ELSE
        # A parameter that was frozen since the forward accumulates nothing, and torch gives no node
        # for it.
        frozen = frozenset(row for row in rows if not _is_trained(self._parameters[row]))
        leaves = self._leaves_of(rows - frozen)  # read again: one that torch has replaced is in no graph
        if not frozen:
            self._known[rows] = leaves
            if leaves.all_accumulate():
                return NOWHERE_ELSE
        found = dict(zip(rows - frozen, map(leaf_gradient, leaves.accumulators), strict=True))
        return Elsewhere(_having(found.items(), LeafGradient.RETURNED), _having(found.items(), LeafGradient.UNWANTED) | frozen)

    def _leaves_of(self, rows: frozenset[int]) -> _Leaves:
        parameters, behind = [self._parameters[row] for row in rows], accumulators_behind()
        return _Leaves(parameters, [behind.get(id(p)) or accumulator(p) for p in parameters])


@dataclass(frozen=True, slots=True)
class _Leaves:
    """The parameters of a graph with their AccumulateGrad nodes."""

    parameters: list[nn.Parameter]
    accumulators: list[Node]

    def all_accumulate(self) -> bool:
        """Whether the backward that runs on this thread adds to `.grad` of each."""
        return all(map(_is_trained, self.parameters)) and will_all_accumulate(self.accumulators)


def with_gradients(positions: Mapping[int, int], returned: Mapping[int, Tensor], results: Sequence[Any]) -> Sequence[Any]:
    """The results of a compiled backward, with these rows' gradients where it returned None."""
    edited = list(results)
    for row, gradient in returned.items():
        edited[positions[row]] = gradient
    return tuple(edited) if isinstance(results, tuple) else edited


def _having(found: Iterable[tuple[int, LeafGradient]], kind: LeafGradient) -> frozenset[int]:
    return frozenset(row for row, of_row in found if of_row is kind)


class ReturnedGradients:
    """The gradients of one backward graph that it shall return, as its nodes make them.

    elsewhere    which do not go to `.grad`, while such a graph runs
    """

    def __init__(self) -> None:
        self.elsewhere = NOWHERE_ELSE
        self._given: dict[int, Tensor] = {}

    @contextmanager
    def returning(self, elsewhere: Elsewhere) -> Iterator[dict[int, Tensor]]:
        """Meanwhile these gradients do not go to `.grad`.

        Gives those that the graph shall return, as they come.
        """
        self.elsewhere = elsewhere
        try:
            yield self._given
        finally:
            self.elsewhere = NOWHERE_ELSE
            self._given = {}

    def keep(self, rows: Sequence[int], grads: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
        """Keep copies of gradients that the graph shall return.

        Returns the rows and gradients that go to `.grad` all the same.
        """
        of = self.elsewhere
        for row, grad in zip(rows, grads, strict=True):
            if row in of.returned:
                self._given[row] = self._given[row] + grad if row in self._given else grad.clone()
        stay = [i for i, row in enumerate(rows) if row not in of.returned and row not in of.unwanted]
        return [rows[i] for i in stay], [grads[i] for i in stay]
