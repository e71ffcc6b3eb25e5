"""The rules of a rewritten graph, each small and named.

A rule that does not hold is a GraphInvariantError with its name.

A rule says which facts must have been given before it can be asked, so that the pipeline asks it
after each pass from then on. The rules look at the graph itself and at what capture found in it,
not at the passes' annotations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from hytrain_fx.capture import dataflow
from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.errors import GraphInvariantError
from hytrain_fx.passes import ops
from hytrain_fx.passes.base import Fact, PassContext
from hytrain_fx.passes.insert_fetches import NO_FORWARD_READERS, coming_before, fetched_rows
from hytrain_fx.passes.insert_release import NO_READERS, released_rows
from hytrain_fx.passes.node_notes import rows_of

_BACKWARD = frozenset({GraphKind.BACKWARD})
_FORWARD = frozenset({GraphKind.FORWARD, GraphKind.INFERENCE})
_SESSION_POSITION = 1


@dataclass(frozen=True)
class Scene:
    """A graph under examination."""

    context: PassContext
    module: fx.GraphModule
    order: dataflow.Order

    def nodes(self, *targets: Any) -> list[fx.Node]:
        """Inserted nodes of these targets, in the order of `targets`, then of the graph."""
        return [node for target in targets for node in self.module.graph.find_nodes(op="call_function", target=target)]

    @property
    def outputs(self) -> Sequence[Any]:
        """What the graph returns now."""
        values: Sequence[Any] = self.module.graph.output_node().args[0]  # type: ignore[assignment]
        return values


@dataclass(frozen=True)
class Rule:
    """A named rule.

    In which graphs it is asked, which facts must be given first, and its complaints.
    """

    name: str
    kinds: frozenset[GraphKind]
    needs: frozenset[Fact]
    complaints: Callable[[Scene], Iterator[str]]


def verify(module: fx.GraphModule, context: PassContext, facts: Iterable[str]) -> tuple[str, ...]:
    """Ask every rule whose needs are among `facts`, and return their names.

    Raises GraphInvariantError.
    """
    scene = Scene(context, module, dataflow.Order.of(module.graph))
    asked = [rule for rule in (*RULES, *STREAMED_RULES) if context.graph.kind in rule.kinds and rule.needs <= set(facts)]
    for rule in asked:
        for complaint in rule.complaints(scene):
            raise GraphInvariantError(f"rule '{rule.name}' does not hold: {complaint}")
    return tuple(rule.name for rule in asked)


def facts_asked_of(kind: GraphKind) -> frozenset[str]:
    """All that must hold of such a graph when its passes are done: then every rule can be asked."""
    return frozenset(fact for rule in RULES if kind in rule.kinds for fact in rule.needs)


def _one_session(scene: Scene) -> Iterator[str]:
    for node in scene.nodes(*ops.ALL_OPS):
        if node.args[_SESSION_POSITION] != scene.context.session:
            yield f"{node.name} carries session {node.args[_SESSION_POSITION]}, expected {scene.context.session}"


def _right_kind(scene: Scene) -> Iterator[str]:
    backward = scene.context.graph.kind is GraphKind.BACKWARD
    for node in scene.nodes(*(ops.FORWARD_OPS if backward else ops.ALL_OPS - ops.FORWARD_OPS)):
        yield f"{node.name} stands in a {scene.context.graph.kind} graph"


def _no_mutation(scene: Scene) -> Iterator[str]:
    held = {a for row in scene.context.graph.held_rows for a in dataflow.aliases(scene.context.graph.holders(row))}
    for node in scene.module.graph.nodes:
        if node.target is ops.FETCH or not dataflow.mutates(node):
            continue
        if node.target in ops.ALL_OPS or held.intersection(node.all_input_nodes):
            yield f"{node.name} writes to one of its operands"


def _offloaded_once(scene: Scene) -> Iterator[str]:
    graph, taken = scene.context.graph, Counter[int]()
    for node in scene.nodes(ops.GRAD_OFFLOAD):
        grads: Any = node.args[0]
        taken.update(rows_of(node))
        for row, grad in zip(rows_of(node), grads, strict=False):
            if row in graph.grads and grad is not graph.gradient(row):
                yield f"{node.name} offloads {grad} as the gradient of row {row}, expected {graph.gradient(row)}"
        if len(grads) != len(rows_of(node)):
            yield f"{node.name} has {len(grads)} gradients for {len(rows_of(node))} rows"
    yield from _exactly_once("offloaded", taken, graph.grads)


def _after_token(*targets: Any) -> Callable[[Scene], Iterator[str]]:
    def complaints(scene: Scene) -> Iterator[str]:
        for target in targets:
            nodes = scene.nodes(target)
            for offload in scene.nodes(ops.GRAD_OFFLOAD):
                after = [n for n in nodes if scene.order.reaches(offload, n) and rows_of(n) == rows_of(offload)]
                if len(after) != 1:
                    yield f"{len(after)} {target.name()} nodes come after {offload.name}, expected 1"
            yield from _exactly_once(target.name(), Counter(r for n in nodes for r in rows_of(n)), scene.context.graph.grads)

    return complaints


def _after_readers(target: Any, ignore: frozenset[object]) -> Callable[[Scene], Iterator[str]]:
    def complaints(scene: Scene) -> Iterator[str]:
        for node in scene.nodes(target):
            for row in rows_of(node):
                found = dataflow.standalone_readers(scene.context.graph.holders(row), ignore)
                if found is None:
                    yield f"{node.name} releases row {row}, which has a reader that may be inlined into a later kernel"
                for reader in found or ():
                    if not scene.order.reaches(reader, node):
                        yield f"{node.name} releases row {row} but does not need the result of its reader {reader.name}"

    return complaints


def _released_once(scene: Scene) -> Iterator[str]:
    released = Counter(r for n in scene.nodes(ops.RELEASE, ops.BACKWARD_END) for r in rows_of(n))
    yield from _exactly_once("released", released, released_rows(scene.context))


def _end_after_all(scene: Scene) -> Iterator[str]:
    graph, ends = scene.context.graph, scene.nodes(ops.BACKWARD_END)
    expected = 1 if released_rows(scene.context) else 0
    if len(ends) != expected:
        yield f"{len(ends)} backward_end nodes, expected {expected}"
    for end in ends:
        if end.args[2] != graph.index:
            yield f"{end.name} carries graph {end.args[2]}, expected {graph.index}"
        needs_held = scene.order.reached_from(holder for row in graph.held_rows for holder in graph.holders(row))
        for node in scene.module.graph.nodes:
            if node.op != "call_function" or not (node.users or node.is_impure()) or node.target in (*NO_READERS, ops.RELOAD):
                continue
            after = node.target is ops.GRAD_OFFLOAD or node in needs_held
            if after and not scene.order.reaches(node, end):
                yield f"{end.name} does not come after {node.name}"


def _outputs_dropped(scene: Scene) -> Iterator[str]:
    graph, gone = scene.context.graph, set(scene.context.graph.grads.values())
    if len(scene.outputs) != len(graph.outputs):
        yield f"{len(scene.outputs)} outputs, expected {len(graph.outputs)}"
    for position, (now, then) in enumerate(zip(scene.outputs, graph.outputs, strict=False)):
        if position in gone and now is not None:
            yield f"output {position} is still {now}, a gradient that is offloaded"
        if position not in gone and now is not then:
            yield f"output {position} is {now}, expected {then}"


def _output_meta(scene: Scene) -> Iterator[str]:
    meta = scene.module.graph.output_node().meta
    for position in meta.get("user_visible_output_idxs", ()):
        if not isinstance(scene.outputs[position], fx.Node):
            yield f"user_visible_output_idxs names output {position}, which is {scene.outputs[position]}"
    if "desc" in meta and len(meta["desc"]) != len(scene.outputs):
        yield f"meta['desc'] describes {len(meta['desc'])} outputs of {len(scene.outputs)}"


def _one_wait(scene: Scene) -> Iterator[str]:
    graph = scene.context.graph
    read = [row for row, holder in graph.weights.items() if dataflow.readers([holder], frozenset({ops.WAIT}))]
    waits = scene.nodes(ops.WAIT)
    yield from _exactly_once("waited for", Counter(r for n in waits for r in rows_of(n)), read)
    for node in waits:
        weights: Any = node.args[0]
        for row, weight in zip(rows_of(node), weights, strict=False):
            if graph.weights.get(row) is not weight:
                yield f"{node.name} waits for {weight} as row {row}, expected {graph.weights.get(row)}"


def _first_of_users(target: Any) -> Callable[[Scene], Iterator[str]]:
    def complaints(scene: Scene) -> Iterator[str]:
        position = scene.order.position
        for node in scene.nodes(target):
            weights: Any = node.args[0]
            for weight in weights:
                for user in weight.users:
                    if user is not node and position[user] < position[node]:
                        yield f"{user.name} takes {weight.name} before {node.name}"

    return complaints


def _one_fetch(scene: Scene) -> Iterator[str]:
    fetches = scene.nodes(ops.FETCH)
    yield from _exactly_once("fetched", Counter(r for n in fetches for r in rows_of(n)), fetched_rows(scene.context))
    for node in fetches:
        expected = [holder for row in rows_of(node) for holder in scene.context.graph.holders(row)]
        if list(node.args[0]) != expected:  # type: ignore[arg-type]
            yield f"{node.name} writes {node.args[0]}, expected all that holds its rows, {expected}"


def _fetched_in_order(scene: Scene) -> Iterator[str]:
    for node, before in coming_before(scene.module.graph):
        missing = [one.name for one in before if one not in node.all_input_nodes]
        if missing:
            yield f"{node.name} may be moved before {missing[0]}, which it does not take"


def _let_go_once(scene: Scene) -> Iterator[str]:
    found = Counter(r for n in scene.nodes(ops.LET_GO) for r in rows_of(n))
    yield from _exactly_once("let go of", found, found.keys() & scene.context.graph.weights.keys())


def _exactly_once(what: str, found: Counter[int], expected: Iterable[int]) -> Iterator[str]:
    wanted = set(expected)
    for row in sorted(wanted):
        if found[row] != 1:
            yield f"row {row} is {what} {found[row]} times, expected once"
    for row in sorted(set(found) - wanted):
        yield f"row {row} is {what}, but it is no such row of this graph"


RULES: tuple[Rule, ...] = (
    Rule("one session", _BACKWARD | _FORWARD, frozenset(), _one_session),
    Rule("nodes stand in their kind of graph", _BACKWARD | _FORWARD, frozenset(), _right_kind),
    Rule("a backward graph writes to no weight", _BACKWARD, frozenset(), _no_mutation),
    Rule("each gradient is offloaded once", _BACKWARD, frozenset({Fact.GRADS_OFFLOADED}), _offloaded_once),
    Rule("updates follow their token", _BACKWARD, frozenset({Fact.STEPS_INSERTED}), _after_token(ops.CPU_STEP, ops.GPU_STEP)),
    Rule("reloads follow their token", _BACKWARD, frozenset({Fact.RELOADS_INSERTED}), _after_token(ops.RELOAD)),
    Rule("a release needs every reader", _BACKWARD, frozenset({Fact.RELEASED}), _after_readers(ops.RELEASE, NO_READERS)),
    Rule("each weight is released once", _BACKWARD, frozenset({Fact.BACKWARD_ENDED}), _released_once),
    Rule("the end comes after everything", _BACKWARD, frozenset({Fact.BACKWARD_ENDED}), _end_after_all),
    Rule("offloaded gradients are no outputs", _BACKWARD, frozenset({Fact.OUTPUTS_DROPPED}), _outputs_dropped),
    Rule("output meta fits the outputs", _BACKWARD, frozenset({Fact.OUTPUTS_DROPPED}), _output_meta),
    Rule("one wait for each weight read", _FORWARD, frozenset({Fact.WAITS_INSERTED}), _one_wait),
    Rule("a wait comes before every reader", _FORWARD, frozenset({Fact.WAITS_INSERTED}), _first_of_users(ops.WAIT)),
)
STREAMED_RULES: tuple[Rule, ...] = (
    Rule("one fetch for each weight that a backward reads", _BACKWARD, frozenset({Fact.FETCHES_INSERTED}), _one_fetch),
    Rule("a fetch comes before every reader", _BACKWARD, frozenset({Fact.FETCHES_INSERTED}), _first_of_users(ops.FETCH)),
    Rule("fetches and gradients keep their order", _BACKWARD, frozenset({Fact.FETCHES_INSERTED}), _fetched_in_order),
    Rule("letting go needs every reader", _FORWARD, frozenset({Fact.LET_GO}), _after_readers(ops.LET_GO, NO_FORWARD_READERS)),
    Rule("each weight is let go of once", _FORWARD, frozenset({Fact.LET_GO}), _let_go_once),
)
"""Asked where weights are streamed (`STREAMED_PASSES`)."""
