"""One Dynamo graph for several sets of parameters.

    for block in self.blocks:     Dynamo captures the forward of the block's class once, after a
        x = block(x)              graph break, say. It runs that graph with each block's
                                  parameters: they are inputs of it.

Our nodes name rows: those of the set that the graph was compiled for. Another set of the same form
runs the same code. `Running` says meanwhile which set it is, and each node acts for the rows of
this set. So such a model compiles as long as one block of it, and what one block has just run is
still in the caches for the next.

    compiled for block 0    wait([0, 1])    grad_offload([0, 1])
    run with block 3        wait([6, 7])    grad_offload([6, 7])      Instance.rows([0, 1])

A set of another form (tied weights, other units) has graphs of its own. A parameter that is not
managed (another model's, a clone) has no row: calls that differ in such ones only are one set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import fx, nn
from torch.autograd.graph import Node

from hytrain_fx.errors import EngineError
from hytrain_fx.torch_private.autograd import node_of_call, nodes_of, running_node
from hytrain_fx.torch_private.trace import copy_of_graph, traced_as_before

RowsOfInputs = dict[int, int]
"""By position among the inputs: the row of the managed parameter there."""


@dataclass(slots=True)
class Instance:
    """A set of parameters, and the graphs that run with it.

    pair        a number that these graphs share
    row_of      by row that the nodes name: the row that they act for. Empty for the set that the
                graphs were compiled for
    graph_of    the same for the numbers of graphs
    """

    pair: int
    row_of: Mapping[int, int] = field(default_factory=dict)
    graph_of: dict[int, int] = field(default_factory=dict)
    _known: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def rows(self, named: Sequence[int]) -> Sequence[int]:
        """The rows that a node acts for which names these."""
        if not self.row_of:
            return named
        key = tuple(named)
        if key not in self._known:
            self._known[key] = tuple(self.row_of[row] for row in key)
        return self._known[key]

    def units(self, unit_of: Mapping[int, int]) -> dict[int, int]:
        """By unit of the rows that are named: the unit of those that are meant."""
        return {unit_of[row]: unit_of[its] for row, its in self.row_of.items()}

    def graph(self, named: int) -> int:
        """The number of a graph, by that of the one that was compiled."""
        return self.graph_of.get(named, named)


class _OfThread(threading.local):
    instance: Instance | None = None


class Running:
    """Whose graphs run, on each thread: in a forward the caller's, in a backward its forward's."""

    def __init__(self) -> None:
        self._here = _OfThread()
        self._behind: WeakKeyDictionary[Node, Instance] = WeakKeyDictionary()  # by node that runs the backward of a call

    @property
    def instance(self) -> Instance | None:
        """The set whose graph runs on this thread; None outside of all."""
        return self._here.instance

    @contextmanager
    def within(self, instance: Instance) -> Iterator[None]:
        """A graph runs on this thread with this set."""
        outer, self._here.instance = self._here.instance, instance
        try:
            yield
        finally:
            self._here.instance = outer

    def call(self, instance: Instance, compiled: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, Node | None]:
        """The results of a compiled function with this set, and the node that runs its backward."""
        before = nodes_of(inputs)
        with self.within(instance):
            results = compiled(*inputs)
        node = node_of_call(results, inputs, before, self._behind)
        if node is not None:
            self._behind[node] = instance
        return results, node

    def one_of(self, instances: Sequence[Instance], *, backward: bool) -> Instance:
        """Which of the sets that share a graph it runs with now. Raises EngineError."""
        if len(instances) == 1:
            return instances[0]
        node = running_node() if backward else None
        found = self.instance if node is None else self._behind.get(node)
        if found is None:
            raise EngineError(f"a compiled graph that {len(instances)} sets of parameters share does not know whose it is, in a "
                              f"{'backward' if backward else 'forward'}; please report this with the torch version")
        return found


G = TypeVar("G", bound=Callable[..., Any])  # what runs the graphs of one set
Compile = Callable[[fx.GraphModule, Sequence[Any], RowsOfInputs, Sequence[G]], G]


def by_parameters(
    gm: fx.GraphModule, example_inputs: Sequence[Any], row_of: Callable[[], Mapping[int, int]], compile_for: Callable[[], Compile[G]]
) -> Callable[..., Any]:
    """What a backend gives for `gm`: it calls the graphs of the parameters that it is called with.

    They are found, or compiled, when these parameters first come.

    row_of         gives, by `id`, the row of each managed parameter
    compile_for    gives what compiles a graph for such example inputs and rows, or has it run what
                   was compiled for one of the sets before; `gm` itself is compiled at once
    """
    positions = tuple(i for i, example in enumerate(example_inputs) if isinstance(example, nn.Parameter))
    if not positions:
        return compile_for()(gm, example_inputs, {}, ())
    pristine = copy_of_graph(gm)  # compiling changes it
    made: dict[tuple[int, ...], G] = {}

    def rows_at(inputs: Sequence[Any]) -> tuple[int, ...]:
        known = row_of()
        return tuple([known.get(id(inputs[i]), -1) for i in positions])

    def make(graph: fx.GraphModule, inputs: Sequence[Any], rows: tuple[int, ...]) -> None:
        managed = {i: row for i, row in zip(positions, rows, strict=True) if row >= 0}
        made[rows] = compile_for()(graph, inputs, managed, tuple(made.values()))

    def call(*inputs: Any) -> Any:
        rows = rows_at(inputs)
        if rows not in made:
            with traced_as_before(pristine) as traced_inputs:
                make(copy_of_graph(pristine), traced_inputs, rows)
        return made[rows](*inputs)

    make(gm, example_inputs, rows_at(example_inputs))
    return call


def rows_alike(of: RowsOfInputs, other: RowsOfInputs, unit_of: Mapping[int, int]) -> dict[int, int] | None:
    """By row of the first set: the one that the other has in its place.

    None where their forms differ. Passes go by the order of rows and of units, and by which rows
    are of one unit, so these must be the same in both.
    """
    if of.keys() != other.keys():
        return None
    pairs = {(row, other[position]) for position, row in of.items()}
    rows, units = dict(pairs), {(unit_of[row], unit_of[its]) for row, its in pairs}
    alike = len(rows) == len(pairs) and len(dict(units)) == len(units)
    return rows if alike and _ascends(pairs) and _ascends(units) else None


def _ascends(pairs: set[tuple[int, int]]) -> bool:
    """Whether the second numbers are in the order of the first ones, and all different."""
    return all(before[1] < after[1] for before, after in pairwise(sorted(pairs)))
