"""A rewritten graph passes the rules; one broken on purpose is refused with the rule's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from hytrain_fx.capture.captured_graph import CapturedGraph, GraphKind
from hytrain_fx.capture.units import Unit
from hytrain_fx.errors import GraphInvariantError
from hytrain_fx.passes import ops
from hytrain_fx.passes.base import Fact, PassContext
from hytrain_fx.passes.pipeline import chosen_passes, run_passes
from hytrain_fx.passes.verify import RULES, STREAMED_RULES, verify
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
    "a wait stands in a backward": ("nodes stand in their kind of graph", lambda g, c: _insert(g, c, ops.WAIT)),
}
def fetch_late(graph: fx.Graph, _: CapturedGraph) -> None:
    """A fetch after the readers of its weights."""
    graph.output_node().prepend(find(graph, ops.FETCH))


def forget_a_holder(graph: fx.Graph, captured: CapturedGraph) -> None:
    """A fetch does not say that it writes one of the placeholders of its weights."""
    fetch = find(graph, ops.FETCH)
    set_arg(fetch, 0, fetch.args[0][:-1])  # type: ignore[index]


def forget_what_came_before(position: int) -> Break:
    """The last fetch does not take one of what came before it; in its list that is there."""
    def spoil(graph: fx.Graph, _: CapturedGraph) -> None:
        fetch = find(graph, ops.FETCH, -1)
        before: Any = fetch.args[2]
        assert len(before) > 1
        set_arg(fetch, 2, [one for one in before if one is not before[position]])

    return spoil


def let_go_of_a_norm(graph: fx.Graph, captured: CapturedGraph) -> None:
    """A weight with a pointwise reader is let go of as if its reader stood alone."""
    let_go = find(graph, ops.LET_GO)
    named = {row for node in graph.find_nodes(op="call_function", target=ops.LET_GO) for row in node.args[2]}
    set_arg(let_go, 2, [*let_go.args[2], min(set(captured.weights) - named)])  # type: ignore[misc]


def let_go_before_a_reader(graph: fx.Graph, captured: CapturedGraph) -> None:
    """The last weights are let go of once the first ones have been read."""
    set_arg(find(graph, ops.LET_GO, -1), 0, find(graph, ops.LET_GO, 0).args[0])


STREAMED_BACKWARD_BREAKS: dict[str, tuple[str, Break]] = {
    "a fetch is deleted": ("one fetch for each weight that a backward reads", lambda g, c: erase(g, find(g, ops.FETCH))),
    "a fetch is doubled": ("one fetch for each weight that a backward reads", lambda g, c: duplicate(g, find(g, ops.FETCH))),
    "a fetch forgets a placeholder": ("one fetch for each weight that a backward reads", forget_a_holder),
    "a fetch comes late": ("a fetch comes before every reader", fetch_late),
    "a fetch may overtake another": ("fetches and gradients keep their order", forget_what_came_before(0)),
    "a fetch may overtake gradients": ("fetches and gradients keep their order", forget_what_came_before(-1)),
    "a fetch has another session": ("one session", lambda g, c: set_arg(find(g, ops.FETCH), 1, 5)),
}
STREAMED_FORWARD_BREAKS: dict[str, tuple[str, Break]] = {
    "a norm is let go of": ("letting go needs every reader", let_go_of_a_norm),
    "a weight is let go of before a reader": ("letting go needs every reader", let_go_before_a_reader),
    "a weight is let go of twice": ("each weight is let go of once", lambda g, c: duplicate(g, find(g, ops.LET_GO))),
    "a backward's node stands in a forward": ("nodes stand in their kind of graph", lambda g, c: _insert(g, c, ops.FETCH)),
}
FORWARD_BREAKS: dict[str, tuple[str, Break]] = {
    "a wait is deleted": ("one wait for each weight read", lambda g, c: erase(g, find(g, ops.WAIT))),
    "a wait is doubled": ("one wait for each weight read", lambda g, c: duplicate(g, find(g, ops.WAIT))),
    "a wait names another row": ("one wait for each weight read", lambda g, c: set_arg(find(g, ops.WAIT), 2, [1])),
    "a wait comes late": ("a wait comes before every reader", move_wait_to_the_end),
    "a wait has another session": ("one session", lambda g, c: set_arg(find(g, ops.WAIT), 1, 5)),
}


def _insert(graph: fx.Graph, captured: CapturedGraph, target: torch._ops.OpOverload) -> None:
    row, weight = next(iter(captured.weights.items()))
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        graph.call_function(target, ([weight], SESSION, [row]))


@pytest.fixture(scope="module")
def captured() -> tuple[list[CapturedGraph], tuple[Unit, ...]]:
    """A small GPT's graphs as captured."""
    model, batches = models.gpt()
    return capture_only(model, batches[0])


@pytest.fixture
def streamed(captured: tuple[list[CapturedGraph], tuple[Unit, ...]]) -> dict[GraphKind, PassContext]:
    """The same, where weights are streamed."""
    graphs, units = [copy_captured(graph) for graph in captured[0]], captured[1]
    for graph in graphs:
        run_passes(graph, session=SESSION, units=units, passes=chosen_passes(None, streamed=True))
    return {graph.kind: PassContext(graph, units, SESSION) for graph in graphs}


@pytest.fixture
def rewritten(captured: tuple[list[CapturedGraph], tuple[Unit, ...]]) -> dict[GraphKind, PassContext]:
    """Copies of these graphs after all passes, to be spoiled."""
    graphs, units = [copy_captured(graph) for graph in captured[0]], captured[1]
    for graph in graphs:
        run_passes(graph, session=SESSION, units=units)
    return {graph.kind: PassContext(graph, units, SESSION) for graph in graphs}


def test_what_the_passes_make_is_accepted(rewritten: dict[GraphKind, PassContext]) -> None:
    """All rules for a kind of graph are asked once all facts are provided, and hold."""
    asked = {rule for context in rewritten.values() for rule in verify(context.graph.module, context, _facts(context))}
    assert asked == {rule.name for rule in RULES}


@pytest.mark.parametrize("case", BACKWARD_BREAKS)
def test_a_broken_backward_graph_is_refused(rewritten: dict[GraphKind, PassContext], case: str) -> None:
    """The complaint names the rule."""
    _expect(rewritten[GraphKind.BACKWARD], *BACKWARD_BREAKS[case])


@pytest.mark.parametrize("case", FORWARD_BREAKS)
def test_a_broken_forward_graph_is_refused(rewritten: dict[GraphKind, PassContext], case: str) -> None:
    """The complaint names the rule."""
    _expect(rewritten[GraphKind.FORWARD], *FORWARD_BREAKS[case])


@pytest.mark.parametrize("case", STREAMED_BACKWARD_BREAKS)
def test_a_broken_backward_graph_of_streamed_weights_is_refused(streamed: dict[GraphKind, PassContext], case: str) -> None:
    """The complaint names the rule."""
    _expect(streamed[GraphKind.BACKWARD], *STREAMED_BACKWARD_BREAKS[case])


@pytest.mark.parametrize("case", STREAMED_FORWARD_BREAKS)
def test_a_broken_forward_graph_of_streamed_weights_is_refused(streamed: dict[GraphKind, PassContext], case: str) -> None:
    """The complaint names the rule."""
    _expect(streamed[GraphKind.FORWARD], *STREAMED_FORWARD_BREAKS[case])


def test_every_rule_has_a_broken_graph() -> None:
    """No rule is left untried."""
    breaks = (*BACKWARD_BREAKS.values(), *FORWARD_BREAKS.values())
    assert {name for name, _ in breaks} == {rule.name for rule in RULES}
    streamed = {name for name, _ in (*STREAMED_BACKWARD_BREAKS.values(), *STREAMED_FORWARD_BREAKS.values())}
    assert streamed >= {rule.name for rule in STREAMED_RULES}


def test_a_rule_is_asked_only_when_its_facts_are_provided(rewritten: dict[GraphKind, PassContext]) -> None:
    """Before the passes that make a rule true, it is not asked."""
    context = rewritten[GraphKind.BACKWARD]
    assert "each weight is released once" not in verify(context.graph.module, context, {Fact.GRADS_OFFLOADED})


def _expect(context: PassContext, rule: str, spoil: Break) -> None:
    facts = _facts(context)
    verify(context.graph.module, context, facts)
    spoil(context.graph.module.graph, context.graph)
    context.graph.module.graph.lint() if not rule.endswith("comes before every reader") else None
    with pytest.raises(GraphInvariantError, match=f"rule '{rule}' does not hold"):
        verify(context.graph.module, context, facts)


def _facts(context: PassContext) -> set[Fact]:
    """All that the passes have given: what streamed weights need is there where a node of it is."""
    nodes = {node.target for node in context.graph.module.graph.nodes}
    return set(Fact) - ({Fact.FETCHES_INSERTED, Fact.LET_GO} if not nodes & {ops.FETCH, ops.LET_GO} else set())
