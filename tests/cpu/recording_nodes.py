"""A small stand-in for the runtime: it counts every node and updates synchronously.

It also poisons weights that may be overwritten.

With `poison`, a weight is NaN from its release until a `wait` for it: a reader that runs after the
release, or ahead of the wait, turns the loss or a gradient into NaN.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from hytrain_fx.capture.backend import Capture
from hytrain_fx.capture.captured_graph import CapturedGraph
from hytrain_fx.capture.units import Unit, group_units
from hytrain_fx.ir.pass_record import PipelineRecord
from hytrain_fx.passes.ops import NODES
from hytrain_fx.passes.pipeline import rewrite

from .interpreted import graphs_interpreted


class RecordingNodes:
    """Implements `ops.StepNodes`."""

    def __init__(self, parameters: Sequence[nn.Parameter], poison: bool) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.ended: list[int] = []
        self.grads: dict[int, torch.Tensor] = {}
        self._parameters = parameters
        self._poison = poison
        self._kept: dict[int, torch.Tensor] = {}

    def grad_offload(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        self._note("grad_offload", rows)
        for row, grad in zip(rows, grads, strict=True):
            parameter = self._parameters[row].detach()
            assert grad.shape == parameter.shape
            # In the parameter's strides, as AccumulateGrad does: strides choose between kernels
            # that round differently.
            laid_out = torch.empty_like(parameter).copy_(grad)
            self.grads[row] = self.grads[row] + laid_out if row in self.grads else laid_out

    def cpu_step(self, rows: Sequence[int]) -> None:
        self._note("cpu_step", rows)

    def gpu_step(self, rows: Sequence[int]) -> None:
        self._note("gpu_step", rows)

    def reload(self, rows: Sequence[int]) -> None:
        self._note("reload", rows)

    def offload_and_step(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        self.grad_offload(rows, grads)
        self.cpu_step(rows)
        self.gpu_step(rows)
        self.reload(rows)

    def release(self, rows: Sequence[int]) -> None:
        self._note("release", rows)
        self.hide(rows)

    def backward_end(self, graph: int, rows: Sequence[int]) -> None:
        self._note("backward_end", rows)
        self.ended.append(graph)
        self.hide(rows)

    def wait(self, rows: Sequence[int]) -> None:
        self._note("wait", rows)
        self.show(rows)

    def fetch(self, rows: Sequence[int]) -> None:
        self._note("fetch", rows)
        self.show(rows)

    def let_go(self, rows: Sequence[int]) -> None:
        self._note("let_go", rows)
        self.hide(rows)

    def hide(self, rows: Sequence[int]) -> None:
        """Poison weights, keeping their values."""
        for row in rows if self._poison else ():
            if row not in self._kept:
                self._kept[row] = self._parameters[row].detach().clone()
                self._parameters[row].data.fill_(torch.nan)

    def show(self, rows: Sequence[int]) -> None:
        """Bring the values of poisoned weights back."""
        for row in rows:
            if row in self._kept:
                self._parameters[row].data.copy_(self._kept.pop(row))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update with the gradients, offloaded or in `.grad`, then poison every weight again."""
        rows = range(len(self._parameters))
        self.show(rows)
        for row, grad in self.grads.items():
            assert self._parameters[row].grad is None, "a gradient came both ways"
            self._parameters[row].grad = grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.grads.clear()
        self.hide(rows)

    def count(self, kind: str) -> dict[int, int]:
        """How often each row was in a node of this kind."""
        found: dict[int, int] = {}
        for name, rows in self.calls:
            for row in rows if name == kind else ():
                found[row] = found.get(row, 0) + 1
        return found

    def _note(self, kind: str, rows: Sequence[int]) -> None:
        self.calls.append((kind, tuple(rows)))


@dataclass(frozen=True)
class Rewritten:
    """A model that is compiled with the rewrite, and everything that was recorded of it."""

    model: nn.Module
    names: tuple[str, ...]
    units: tuple[Unit, ...]
    nodes: RecordingNodes
    capture: Capture[PipelineRecord]
    session: int
    captured: list[CapturedGraph]


def compile_rewritten(model: nn.Module, poison: bool = True, **compile_options: Any) -> Rewritten:
    """Compile a model in place, all its trainable parameters managed."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    nodes = RecordingNodes(tuple(named.values()), poison)
    session = NODES.register(nodes, tuple(named.values()))
    units = group_units(model, tuple(named))
    captured: list[CapturedGraph] = []

    def on_graph(graph: CapturedGraph) -> PipelineRecord:
        captured.append(graph)
        return rewrite(graph, session=session, units=units)

    capture = Capture(tuple(named), tuple(named.values()), units, on_graph)
    torch._dynamo.reset()
    model.compile(backend=capture.backend, **compile_options)
    return Rewritten(model, tuple(named), units, nodes, capture, session, captured)


def capture_only(model: nn.Module, *batches: tuple[Any, ...]) -> tuple[list[CapturedGraph], tuple[Unit, ...]]:
    """The graphs of a forward and a backward for each batch, as captured, not rewritten.

    All trainable parameters are managed.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    units = group_units(model, tuple(named))
    captured: list[CapturedGraph] = []
    capture = Capture(tuple(named), tuple(named.values()), units, captured.append)
    torch._dynamo.reset()
    with graphs_interpreted():
        model.compile(backend=capture.backend)
        for batch in batches:
            model(*batch).backward()
    model.zero_grad(set_to_none=True)
    return captured, units


def copy_captured(graph: CapturedGraph) -> CapturedGraph:
    """A captured graph over a copy of its module, to be edited."""
    copied, new = fx.Graph(), dict[fx.Node, fx.Node]()
    result = copied.graph_copy(graph.module.graph, new)
    copied.output(result)
    copied.output_node().meta = copy.copy(graph.module.graph.output_node().meta)
    return dataclasses.replace(
        graph,
        module=fx.GraphModule(graph.module, copied),
        weights={row: new[node] for row, node in graph.weights.items()},
        views={row: tuple(new[node] for node in nodes) for row, nodes in graph.views.items()},
        outputs=tuple(new[value] if isinstance(value, fx.Node) else value for value in graph.outputs),
    )


def assert_trains_alike(model: nn.Module, batches: Sequence[tuple[Any, ...]], poison: bool = True, **compile_options: Any) -> Rewritten:
    """Losses and weights have the same bits with and without the rewrite, after some steps.

    Each gradient is offloaded once a step.
    """
    plain = copy.deepcopy(model)
    ours = compile_rewritten(model, poison, **compile_options)
    ours.nodes.hide(range(len(ours.names)))
    losses = train(model, batches, ours.nodes.step)
    plain.compile()
    assert losses == train(plain, batches)
    assert_same_weights(ours, plain)
    return ours


def train(
    model: nn.Module, batches: Sequence[tuple[Any, ...]], step: Callable[[torch.optim.Optimizer], None] | None = None
) -> list[float]:
    """Train with AdamW over the batches; gives the loss of each step.

    `step` is the nodes' own, or None for the optimizer's.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for batch in batches:
        value = model(*batch)
        value.backward()
        losses.append(float(value.detach()))
        if step is not None:
            step(optimizer)
        else:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return losses


def assert_same_weights(model: Rewritten, plain: nn.Module) -> None:
    """Every parameter and buffer has the same bits in both."""
    model.nodes.show(range(len(model.names)))
    expected = plain.state_dict()
    for name, value in model.model.state_dict().items():
        assert torch.equal(value, expected[name]), f"{name} differs by {(value - expected[name]).abs().max()}"
