"""One Dynamo graph for several sets of parameters.

Each set has its own compiled graphs, with the nodes of its own rows.

    for block in self.blocks:     Dynamo captures the forward of the block's class once, after a
        x = block(x)              graph break, say. It runs that graph with each block's
                                  parameters: they are inputs of it.

Ours have nodes for certain rows, so a call with other parameters goes to graphs that are compiled
for these. A parameter that is not managed (another model's, a clone) has no row: calls that differ
in such ones only share their graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from hytrain_fx.torch_private.trace import copy_of_graph, traced_as_before

RowsOfInputs = dict[int, int]
"""By position among the inputs: the row of the managed parameter there."""
Compile = Callable[[fx.GraphModule, Sequence[Any], RowsOfInputs], Callable[..., Any]]


def by_parameters(
    gm: fx.GraphModule, example_inputs: Sequence[Any], row_of: Callable[[], Mapping[int, int]], compile_for: Callable[[], Compile]
) -> Callable[..., Any]:
    """What a backend gives for `gm`: it calls the graphs of the parameters that it is called with.

    They are compiled when these parameters first come.

    row_of         gives, by `id`, the row of each managed parameter
    compile_for    gives what compiles a graph for such example inputs and rows; `gm` itself is
                   compiled at once
    """
    positions = tuple(i for i, example in enumerate(example_inputs) if isinstance(example, nn.Parameter))
    if not positions:
        return compile_for()(gm, example_inputs, {})
    pristine = copy_of_graph(gm)  # compiling changes it

    def rows_at(inputs: Sequence[Any]) -> tuple[int, ...]:
        known = row_of()
        return tuple([known.get(id(inputs[i]), -1) for i in positions])

    def compiled(graph: fx.GraphModule, inputs: Sequence[Any], rows: tuple[int, ...]) -> Callable[..., Any]:
        return compile_for()(graph, inputs, {i: row for i, row in zip(positions, rows, strict=True) if row >= 0})

    first = rows_at(example_inputs)
    made = {first: compiled(gm, example_inputs, first)}

    def call(*inputs: Any) -> Any:
        rows = rows_at(inputs)
        if rows not in made:
            with traced_as_before(pristine) as traced_inputs:
                made[rows] = compiled(copy_of_graph(pristine), traced_inputs, rows)
        return made[rows](*inputs)

    return call
