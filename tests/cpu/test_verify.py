"""A rewritten graph passes the rules; one broken on purpose is refused with the rule's name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from hytrain_fx.capture.captured_graph import CapturedGraph, GraphKind
from hytrain_fx.capture.units import Unit
from hytrain_fx.errors import GraphInvariantError
from hytrain_fx.passes import ops
from hytrain_fx.passes.base import Fact, PassContext
from hytrain_fx.passes.pipeline import run_passes
from hytrain_fx.passes.verify import RULES, verify
from tests.cpu import models
from tests.cpu.recording_nodes import capture_only, copy_captured

SESSION = 4
Break = Callable[[fx.Graph, CapturedGraph], None]


def find(graph: fx.Graph, target: torch._ops.OpOverload, index: int = 0) -> fx.Node:
    """An inserted node."""
    node: fx.Node = graph.find_nodes(op="call_function", target=target)[index]
    return node


def erase(graph: fx.Graph, node: fx.Node) -> None:
    """Take a node out; what used its result uses its first argument instead."""
    if node.users:
        first = node.args[0]
        node.replace_all_uses_with(first if isinstance(first, fx.Node) else first[0])  # type: ignore[index, arg-type]
    graph.erase_node(node)


def set_arg(node: fx.Node, position: int, value: object) -> None:
    """Replace one argument of a node."""
    node.update_arg(position, value)  # type: ignore[arg-type]


def duplicate(graph: fx.Graph, node: fx.Node) -> None:
    """Insert the same call once more after it."""
    with graph.inserting_after(node):
        graph.call_function(node.target, node.args).meta["val"] = node.meta["val"]  # type: ignore[arg-type]


def write_to_a_weight(graph: fx.Graph, captured: CapturedGraph) -> None:
    """A node that fills a weight after its first reader."""
    weight = next(iter(captured.weights.values()))
    with graph.inserting_after(next(iter(weight.users))):
        graph.call_function(torch.ops.aten.zero_.default, (weight,))


def move_wait_to_the_end(graph: fx.Graph, _: CapturedGraph) -> None:
    """A wait after the readers of its weights."""
    graph.output_node().prepend(find(graph, ops.WAIT))


def release_a_norm_early(graph: fx.Graph, captured: CapturedGraph) -> None:
    """A weight with a pointwise reader moves from `backward_end` to a release."""
    release, end = find(graph, ops.RELEASE), find(graph, ops.BACKWARD_END)
    inlined = end.args[3][0]  # type: ignore[index]
    set_arg(release, 2, [*release.args[2], inlined])  # type: ignore[misc]
    set_arg(end, 3, [row for row in end.args[3] if row != inlined])  # type: ignore[union-attr]


def release_before_a_reader(graph: fx.Graph, captured: CapturedGraph) -> None:
    """The last release takes the results of the first one's readers instead of its own."""
    set_arg(find(graph, ops.RELEASE, -1), 0, find(graph, ops.RELEASE, 0).args[0])


def keep_a_gradient_output(graph: fx.Graph, captured: CapturedGraph) -> None:
    """A gradient that is offloaded is returned as well."""
    position = next(iter(captured.grads.values()))
    output = graph.output_node()
    output.args = (tuple(captured.outputs[i] if i == position else value for i, value in enumerate(output.args[0])),)  # type: ignore[arg-type]


def drop_an_end_dependency(graph: fx.Graph, _: CapturedGraph) -> None:
    """`backward_end` no longer comes after the last unit's token."""
    end = find(graph, ops.BACKWARD_END)
    set_arg(end, 0, end.args[0][:-1])  # type: ignore[index]


def forget_output_meta(graph: fx.Graph, captured: CapturedGraph) -> None:
    """The meta still names outputs that are None now: the trap that fails on CUDA only."""
    graph.output_node().meta["user_visible_output_idxs"] = list(range(len(captured.outputs)))


BACKWARD_BREAKS: dict[str, tuple[str, Break]] = {
    "an offload is deleted": ("each gradient is offloaded once", lambda g, c: erase(g, find(g, ops.GRAD_OFFLOAD))),
    "an offload is doubled": ("each gradient is offloaded once", lambda g, c: duplicate(g, find(g, ops.GRAD_OFFLOAD))),
    "gradients are swapped": (
        "each gradient is offloaded once",
        lambda g, c: set_arg(find(g, ops.GRAD_OFFLOAD), 2, [*find(g, ops.GRAD_OFFLOAD).args[2]][::-1]),  # type: ignore[misc]
    ),
    "a cpu_step is deleted": ("updates follow their token", lambda g, c: erase(g, find(g, ops.CPU_STEP))),
    "a gpu_step is doubled": ("updates follow their token", lambda g, c: duplicate(g, find(g, ops.GPU_STEP))),
    "a cpu_step loses its token": (
        "updates follow their token",
        lambda g, c: set_arg(find(g, ops.CPU_STEP), 0, g.find_nodes(op="placeholder")[0]),
    ),
    "a reload is deleted": ("reloads follow their token", lambda g, c: erase(g, find(g, ops.RELOAD))),
    "a release is deleted": ("each weight is released once", lambda g, c: erase(g, find(g, ops.RELEASE))),
    "a release is doubled": ("each weight is released once", lambda g, c: duplicate(g, find(g, ops.RELEASE))),
    "a norm is released early": ("a release needs every reader", release_a_norm_early),
    "a release comes before a reader": ("a release needs every reader", release_before_a_reader),
    "the end is deleted": ("each weight is released once", lambda g, c: erase(g, find(g, ops.BACKWARD_END))),
    "the end misses a token": ("the end comes after everything", drop_an_end_dependency),
    "the end carries another graph": ("the end comes after everything", lambda g, c: set_arg(find(g, ops.BACKWARD_END), 2, 99)),
    "a gradient is still returned": ("offloaded gradients are no outputs", keep_a_gradient_output),
    "output meta is stale": ("output meta fits the outputs", forget_output_meta),
    "a weight is written": ("a backward graph writes to no weight", write_to_a_weight),
    "a node has another session": ("one session", lambda g, c: set_arg(find(g, ops.RELOAD), 1, 5)),
    "a wait stands in a backward": ("nodes stand in their kind of graph", lambda g, c: _insert_wait(g, c)),
}
FORWARD_BREAKS: dict[str, tuple[str, Break]] = {
    "a wait is deleted": ("one wait for each weight read", lambda g, c: erase(g, find(g, ops.WAIT))),
    "a wait is doubled": ("one wait for each weight read", lambda g, c: duplicate(g, find(g, ops.WAIT))),
    "a wait names another row": ("one wait for each weight read", lambda g, c: set_arg(find(g, ops.WAIT), 2, [1])),
    "a wait comes late": ("a wait comes before every reader", move_wait_to_the_end),
    "a wait has another session": ("one session", lambda g, c: set_arg(find(g, ops.WAIT), 1, 5)),
}


def _insert_wait(graph: fx.Graph, captured: CapturedGraph) -> None:
    row, weight = next(iter(captured.weights.items()))
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        graph.call_function(ops.WAIT, ([weight], SESSION, [row]))


@pytest.fixture(scope="module")
def captured() -> tuple[list[CapturedGraph], tuple[Unit, ...]]:
    """A small GPT's graphs as captured."""
    model, batches = models.gpt()
    return capture_only(model, batches[0])


@pytest.fixture
def rewritten(captured: tuple[list[CapturedGraph], tuple[Unit, ...]]) -> dict[GraphKind, PassContext]:
    """Copies of these graphs after all passes, to be spoiled."""
    graphs, units = [copy_captured(graph) for graph in captured[0]], captured[1]
    for graph in graphs:
        run_passes(graph, session=SESSION, units=units)
    return {graph.kind: PassContext(graph, units, SESSION) for graph in graphs}


def test_what_the_passes_make_is_accepted(rewritten: dict[GraphKind, PassContext]) -> None:
    """All rules for a kind of graph are asked once all facts are provided, and hold."""
    asked = {rule for context in rewritten.values() for rule in verify(context.graph.module, context, Fact)}
    assert asked == {rule.name for rule in RULES}


@pytest.mark.parametrize("case", BACKWARD_BREAKS)
def test_a_broken_backward_graph_is_refused(rewritten: dict[GraphKind, PassContext], case: str) -> None:
    """The complaint names the rule."""
    _expect(rewritten[GraphKind.BACKWARD], *BACKWARD_BREAKS[case])


@pytest.mark.parametrize("case", FORWARD_BREAKS)
def test_a_broken_forward_graph_is_refused(rewritten: dict[GraphKind, PassContext], case: str) -> None:
    """The complaint names the rule."""
    _expect(rewritten[GraphKind.FORWARD], *FORWARD_BREAKS[case])


def test_every_rule_has_a_broken_graph() -> None:
    """No rule is left untried."""
    assert {name for name, _ in (*BACKWARD_BREAKS.values(), *FORWARD_BREAKS.values())} == {rule.name for rule in RULES}


def test_a_rule_is_asked_only_when_its_facts_are_provided(rewritten: dict[GraphKind, PassContext]) -> None:
    """Before the passes that make a rule true, it is not asked."""
    context = rewritten[GraphKind.BACKWARD]
    assert "each weight is released once" not in verify(context.graph.module, context, {Fact.GRADS_OFFLOADED})


def _expect(context: PassContext, rule: str, spoil: Break) -> None:
    verify(context.graph.module, context, Fact)
    spoil(context.graph.module.graph, context.graph)
    context.graph.module.graph.lint() if rule != "a wait comes before every reader" else None
    with pytest.raises(GraphInvariantError, match=f"rule '{rule}' does not hold"):
        verify(context.graph.module, context, Fact)
