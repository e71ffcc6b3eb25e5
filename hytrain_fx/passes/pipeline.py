"""The passes in their order, and the one loop that runs them.

For each pass: contract, pass, fake results, lint, rules, record.

    backward              annotate_units -> insert_grad_offload -> insert_steps -> insert_reload ->
                          insert_release -> insert_backward_end -> drop_grad_outputs
    forward, inference    annotate_units -> insert_waits

Last, what the compiler is given has one call for the four nodes of a unit (`one_call.py`).
`DEFAULT_PASSES` is one list for all graphs; each pass says which kinds it is for. What a pass
leaves is checked at once, a user's pass like ours, and an error names the pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import fx

from hytrain_fx.capture.captured_graph import CapturedGraph, GraphKind
from hytrain_fx.capture.units import Unit
from hytrain_fx.errors import ConfigError, GraphInvariantError
from hytrain_fx.ir.pass_record import PassRecord, PipelineRecord
from hytrain_fx.passes.annotate_units import annotate_units
from hytrain_fx.passes.base import GraphPass, PassContext, as_pass
from hytrain_fx.passes.drop_grad_outputs import drop_grad_outputs
from hytrain_fx.passes.graph_dump import GraphDump
from hytrain_fx.passes.insert_backward_end import insert_backward_end
from hytrain_fx.passes.insert_fetches import STREAMED_PASSES
from hytrain_fx.passes.insert_grad_offload import insert_grad_offload
from hytrain_fx.passes.insert_release import insert_release
from hytrain_fx.passes.insert_steps import insert_reload, insert_steps
from hytrain_fx.passes.insert_waits import insert_waits
from hytrain_fx.passes.new_nodes import Before, finish_new_nodes
from hytrain_fx.passes.node_notes import note
from hytrain_fx.passes.one_call import join_calls
from hytrain_fx.passes.verify import facts_asked_of, verify

DEFAULT_PASSES: tuple[GraphPass, ...] = (
    annotate_units,
    insert_grad_offload,
    insert_steps,
    insert_reload,
    insert_release,
    insert_backward_end,
    drop_grad_outputs,
    insert_waits,
)
"""What `compile` runs; `passes=` takes a list like this one."""


def chosen_passes(given: Sequence[Any] | None, *, streamed: bool = False) -> tuple[GraphPass, ...]:
    """The passes that a user chose, or the default ones, checked; with those of streamed weights.

    Raises ConfigError for what is no pass, where a pass would not find what it needs, and where the
    list lacks a pass without which a graph would train wrongly.
    """
    passes = DEFAULT_PASSES if given is None else tuple(map(as_pass, given))
    passes += tuple(one for one in STREAMED_PASSES if streamed and one not in passes)
    for kind in GraphKind:
        lacking = sorted(facts_asked_of(kind) - check_order(passes, kind))
        if lacking:
            own = next((one for one in DEFAULT_PASSES if lacking[0] in one.contract.gives), None)
            raise ConfigError(
                f"passes: for {kind} graphs no pass gives {str(lacking[0])!r}; those given are {_names(of_kind(passes, kind))}. "
                f"Add {own.name if own else 'a pass that gives it'}, as hytrain_fx.DEFAULT_PASSES has it")
    return passes


def are_own(passes: Sequence[GraphPass]) -> bool:
    """Whether all are ours: what they do depends on the form of a graph's rows and units alone."""
    return all(one in DEFAULT_PASSES or one in STREAMED_PASSES for one in passes)


def of_kind(passes: Sequence[GraphPass], kind: GraphKind) -> tuple[GraphPass, ...]:
    """Those that are for this kind of graph, in order."""
    return tuple(one for one in passes if kind in one.contract.kinds)


def check_order(passes: Sequence[GraphPass], kind: GraphKind) -> frozenset[str]:
    """The facts that the passes for this kind of graph give in all.

    Raises ConfigError, naming pass and fact, where one does not find what it needs or gives what
    holds already.
    """
    facts: set[str] = set()
    chosen = of_kind(passes, kind)
    for number, one in enumerate(chosen):
        missing = sorted(one.contract.needs - facts)
        again = sorted(one.contract.gives & facts)
        if missing or again:
            state = f"needs that {missing[0]}" if missing else f"must not run when {again[0]}"
            raise ConfigError(f"passes: for {kind} graphs pass {one.name} {state}; before it come: {_names(chosen[:number])}. "
                              "Change the order of passes")
        facts |= one.contract.gives
    return frozenset(facts)


def rewrite(
    graph: CapturedGraph, *, session: int, units: Sequence[Unit], passes: Sequence[GraphPass] = DEFAULT_PASSES,
    dump: GraphDump | None = None,
) -> PipelineRecord:
    """Make of `graph.module`, in place, what the compiler is given. Raises as `run_passes` does."""
    record = run_passes(graph, session=session, units=units, passes=passes, dump=dump)
    join_calls(graph.module.graph)
    graph.module.recompile()
    return record


def run_passes(
    graph: CapturedGraph, *, session: int, units: Sequence[Unit], passes: Sequence[GraphPass] = DEFAULT_PASSES,
    dump: GraphDump | None = None,
) -> PipelineRecord:
    """Run the passes that are for this kind of graph on `graph.module`, in place.

    Raises ConfigError where a contract does not hold, before anything runs; GraphInvariantError,
    naming the pass, where one fails or leaves a graph that is invalid or breaks a rule of
    `passes.verify`. Nothing is compiled then.
    """
    check_order(passes, graph.kind)
    context = PassContext(graph, tuple(units), session)
    records: list[PassRecord] = []
    facts: set[str] = set()
    text = readable(graph.module)
    for number, one in enumerate(of_kind(passes, graph.kind)):
        record = _run(one, context, facts, text)
        text = record.after
        records.append(record)
        if dump is not None:
            dump.write(graph.name, number, record)
    return PipelineRecord(tuple(records), {node.name: note(node) for node in graph.module.graph.nodes})


def readable(module: fx.GraphModule) -> str:
    """The graph as Python text, with dtypes and shapes."""
    return str(module.print_readable(print_output=False))


def _run(one: GraphPass, context: PassContext, facts: set[str], text_before: str) -> PassRecord:
    module = context.graph.module
    before = Before.of(module.graph)
    started = time.perf_counter()
    try:
        notes = one(module, context)
        duration_us = (time.perf_counter() - started) * 1e6
        module.graph.lint()
        added = finish_new_nodes(module.graph, before, one.name)
        facts |= one.contract.gives
        rules = verify(module, context, facts)
        return PassRecord(one.name, notes, added, duration_us, rules, text_before, readable(module))
    except Exception as error:
        said = str(error) if isinstance(error, GraphInvariantError) else f"{type(error).__name__}: {error}"
        raise GraphInvariantError(
            f"graph {context.graph.name} after {one.name}: {said}. This is a fault of the pass {one.name}, not of the model; "
            "where the pass is one of hytrain_fx, please report it with the dumped graph"
        ) from error


def _names(passes: Sequence[GraphPass]) -> str:
    return ", ".join(one.name for one in passes) or "no passes"
