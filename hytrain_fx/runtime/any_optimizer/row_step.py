"""What a commit hands to the engine for one row.

It is the step, its numbers fixed, to be run where the row rests, once its gradient is there.

    TracedStep     the FX graph with this step's numbers
    OpByOpStep     the class's own step, on an optimizer that holds this parameter alone
    no_step        nothing: another rank updates the parameter
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.any_optimizer.marks import Marks, beside, copied, refuse_set
from hytrain_fx.runtime.any_optimizer.recording import Device, Form, Number, Recording, Value
from hytrain_fx.runtime.any_optimizer.shell import Options, Shells, run_step
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.own_states import OwnStates, is_scalar, is_tensor, leaves, map_leaves
from hytrain_fx.torch_private.tensors import memory_of


@dataclass(frozen=True)
class TracedStep:
    """Runs a recorded step."""

    form: Form
    graph: fx.GraphModule
    recording: Recording

    def __call__(self, states: RowStates, gradient: torch.Tensor, factors: Iterable[float], out: torch.Tensor | None) -> None:
        """Update the states in place.

        `gradient` and `out`, the new weight, are flat, in the weight's dtype.
        """
        own = own_of(states)
        given = [self.form.view(states.master), self.form.view(scaled(gradient, factors)), *filter(is_tensor, leaves(own.entry))]
        made = dict(zip(returned(self.recording), self.graph.forward(states.master.device, *given, *self.recording.numbers), strict=True))

        def kept(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return made[leaf.index] if leaf.index in made else given[leaf.index]
            return leaf.clone() if is_scalar(leaf) else leaf

        own.entry = map_leaves(self.recording.entry, kept)
        if out is not None:
            out.copy_(states.master)


@dataclass(frozen=True)
class OpByOpStep:
    """Runs the class's own step."""

    form: Form
    shells: Shells
    options: Options
    marks: Marks

    def __call__(self, states: RowStates, gradient: torch.Tensor, factors: Iterable[float], out: torch.Tensor | None) -> None:
        """Like `TracedStep`."""
        self.run(states, gradient, factors)
        if out is not None:
            out.copy_(states.master)

    def run(self, states: RowStates, gradient: torch.Tensor, factors: Iterable[float]) -> torch.optim.Optimizer:
        """Update the states in place, and return the optimizer that did.

        Raises UnsupportedError for a step that sets something on the parameter.
        """
        own, weight = own_of(states), self.form.view(states.master)
        parameter, marks = nn.Parameter(weight), beside(self.marks, weight.device)
        vars(parameter).update(copied(marks))
        parameter.grad = grad = self.form.view(scaled(gradient, factors))
        shell = self.shells.make([(dict(self.options), [parameter])], {} if own.entry is None else {parameter: own.entry})
        run_step(shell)
        refuse_set(self.shells.kind.__name__, parameter, marks)
        own.entry = map_leaves(shell.state.get(parameter), lambda leaf: _apart(leaf, grad))
        if parameter.data_ptr() != weight.data_ptr():  # `p.data = ...`
            weight.copy_(parameter.detach())
        return shell


def no_step(states: RowStates, gradient: torch.Tensor, factors: Iterable[float], out: torch.Tensor | None) -> None:
    """Of a row that has no elements here."""


def scaled(gradient: torch.Tensor, factors: Iterable[float]) -> torch.Tensor:
    """The gradient in fp32, multiplied by its factors.

    Each product is rounded to the gradient's dtype.
    """
    for factor in factors:
        gradient = (gradient.float() * factor).to(gradient.dtype)
    return gradient.float()


def own_of(states: RowStates) -> OwnStates:
    """The optimizer's own states among a row's."""
    if states.own is None:
        raise EngineError("internal: a row without states of its own is updated by another optimizer than Adam or AdamW")
    return states.own


def _apart(leaf: Any, gradient: torch.Tensor) -> Any:
    """After the step the gradient's memory belongs to another gradient: keep a copy."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) and memory_of(leaf) == memory_of(gradient) else leaf


# ---- A recorded step as an FX graph: torch's operations in the same order, so the same bits ----
#
# Every operation lets go of the GIL.
#
#     forward(device, v0, v1, ..., n0, n1, ...)      device of the row; parameter, gradient, states;
#                                                    numbers
#         mul_ = torch.ops.aten.mul_.Tensor(v0, n0)
#         ...
#         return (v5, ...)                           values that are kept and were not given


def returned(recording: Recording) -> tuple[int, ...]:
    """The values that the graph returns, in order."""
    return tuple(index for index in recording.kept if index >= recording.inputs or index in recording.copied)


def graph_of(recording: Recording) -> fx.GraphModule:
    """The graph, in which numbers are inputs.

    It serves every recording of the same key, on any device.
    """
    graph = fx.Graph()
    device = graph.placeholder("device")
    values = {index: graph.placeholder(f"v{index}") for index in range(recording.inputs)}
    numbers = [graph.placeholder(f"n{index}") for index in range(len(recording.numbers))]

    def node_of(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return values[leaf.index]
        if isinstance(leaf, Number):
            return numbers[leaf.index]
        return device if isinstance(leaf, Device) else leaf

    for call in recording.calls:
        node = graph.call_function(call.operation, map_leaves(call.args, node_of), map_leaves(call.kwargs, node_of))
        for position, index in call.made:
            values[index] = node if position is None else graph.call_function(operator.getitem, (node, position))
    results = []
    for index in returned(recording):
        copied = index in recording.copied
        results.append(graph.call_function(torch.ops.aten.clone.default, (values[index],)) if copied else values[index])
    graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)
