"""The torch.compile backend of one model: stock Inductor, with a rewrite of each graph on the way.

    torch.compile -> backend(gm, example_inputs)
                  -> compile_fx (stock: AOTAutograd, decompositions, partitioner)
                  -> inner_compile(graph): CapturedGraph -> rewrite -> compile_fx_inner (stock)

Example inputs are the real Parameters, so a graph's placeholders and gradient outputs map to rows
by identity, through `meta["desc"]`. A backward graph is compiled at the first backward, long after
its forward graph; what the two share lives in one `Pair` per call of the backend. A recompile (a
new shape, a new branch) is a new pair, rewritten again with the same rows.

Blocks of one class around graph breaks are called with the same Dynamo graph. Other parameters of
the same form run the same pair, each as a graph of its own number (`instance_graphs`).

A parameter read by two pairs (tied across a graph break, or a model called twice) has two partial
gradients in one backward. Each pair offloads its own: two `grad_offload` for one row add up, as
AccumulateGrad would, and of two releases the later counts. So no pair needs to know of another, and
a pair that is already compiled stays right when the next one shows up.

A parameter with a gradient hook of the user keeps its gradient output, so that the hook sees it and
`.grad` arrives as usual.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import fx, nn
from torch.autograd.graph import Node

from hytrain_fx.capture.attention_masks import masks_of_positions
from hytrain_fx.capture.captured_graph import (
    CapturedGraph,
    CompiledGraph,
    GraphKind,
    first_use_order,
    may_move_weights,
    saved_views,
    unit_flops,
)
from hytrain_fx.capture.casts import InputCopies
from hytrain_fx.capture.instance_graphs import Instance, RowsOfInputs, Running, by_parameters, rows_alike
from hytrain_fx.capture.pairs import Pair, PairGraphs, has_user_hooks
from hytrain_fx.capture.units import Unit, unit_of_rows
from hytrain_fx.errors import CaptureError, EngineError, UnsupportedError
from hytrain_fx.ir.startup import Phase
from hytrain_fx.torch_private import compiling
from hytrain_fx.torch_private.options import graph_options
from hytrain_fx.torch_private.trace import traced_form

R = TypeVar("R")


class Capture(Generic[R]):
    """The backend of one compiled model and the record of its graphs.

    names, parameters    the managed parameters, row = position
    units                their grouping (`units.group_units`)
    rewrite              edits `CapturedGraph.module` in place; its result is kept in `graphs`
    around_backward      entered, with the graph's index, while a compiled backward graph runs; may
                         give what edits its results
    around_forward       entered, with the graph's index, while any other compiled graph runs
    call                 calls what torch has compiled, with its own preparations, with inputs
    timed                entered, with the phase of start-up it is, while a graph is compiled or
                         rewritten
    copies_for           says, of a graph with its example inputs and their rows, which inputs are
                         to be read in bf16 copies; None: none are
    ran                  told, after each call of a compiled graph, which node runs its backward
    running              says, to whoever has it, whose graph runs
    share                gives, of a graph that another set of parameters runs too, as this number,
                         what `rewrite` would have given; None: each set has graphs of its own
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        units: Sequence[Unit],
        rewrite: Callable[[CapturedGraph], R],
        around_backward: Callable[[int], AbstractContextManager[compiling.Edit | None]] = lambda _: contextlib.nullcontext(),
        around_forward: Callable[[int], AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
        call: Callable[[Callable[..., Any], Sequence[Any]], Any] = lambda compiled, inputs: compiled(*inputs),
        timed: Callable[[Phase], AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
        copies_for: Callable[[fx.GraphModule, Sequence[Any], Mapping[int, int]], InputCopies | None] | None = None,
        ran: Callable[[Node | None], None] = lambda _: None,
        running: Running | None = None,
        share: Callable[[CompiledGraph[R], int, Instance], R] | None = None,
    ) -> None:
        if len(names) != len(parameters):
            raise CaptureError(f"{len(names)} names for {len(parameters)} parameters; expected one name for each")
        self.names, self.parameters, self.units = tuple(names), tuple(parameters), tuple(units)
        self.graphs: list[CompiledGraph[R]] = []
        self.breaks: dict[str, None] = {}  # where and why Dynamo has ended graphs before the forward's end
        self._rewrite = rewrite
        self._around_backward = around_backward
        self._around_forward = around_forward
        self._call = call
        self._timed = timed
        self._copies_for = copies_for
        self._ran, self._share = ran, share
        self._running = running or Running()
        self._row_of = {id(p): row for row, p in enumerate(self.parameters)}
        self._unit_of = unit_of_rows(units)
        self._used: dict[int, None] = {}
        self._pairs = 0
        self._captured = 0

    @property
    def unit_order(self) -> tuple[int, ...]:
        """All units in the order of first use in forwards so far; those not seen yet come last."""
        return tuple({**self._used, **{unit.number: None for unit in self.units}})

    def next_in_order(self, unit: int) -> bool:
        """This unit comes next, unless it has a place already; whether it had none."""
        known, self._used[unit] = unit in self._used, None
        return not known

    def backend(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compile one Dynamo graph.

        `torch.compile(model, backend=capture.backend, mode=..., options=...)` calls it.
        """
        if (place := compiling.graph_break_after(gm)) is not None:
            self.breaks[place] = None
        patches = graph_options(mode, options)
        _refuse_cudagraphs(patches.get("triton.cudagraphs", False))
        # torch keeps what it is given here as long as the code lives. A model that was dropped must
        # not live on because of it.
        alive = self._alive
        compiled = by_parameters(gm, example_inputs, lambda: alive()._row_of, lambda: partial(alive()._compile, patches=patches))
        return lambda *inputs: alive()._call(compiled, inputs)

    def _compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], rows: RowsOfInputs, others: Sequence[PairGraphs], *,
        patches: dict[str, Any],
    ) -> PairGraphs:
        with self._timed(Phase.COMPILE_FORWARD):
            copies = None if self._copies_for is None else self._copies_for(gm, example_inputs, rows)
            for other in others:
                if other.reads_like(copies) and (instance := self._shared_with(other.pair, rows)) is not None:
                    return other.run_with(instance, copies)
        pair = Pair(rows, [self._new_instance({})])
        alive = self._alive

        def inner_compile(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            _refuse_cudagraphs(kwargs.get("cudagraphs", False))
            with alive()._timed(Phase.PASSES):
                captured = alive()._on_graph(graph, pair, _kind(kwargs))
            with compiling.layouts_kept() if may_move_weights(captured) else contextlib.nullcontext():
                compiled = compiling.compile_fx_inner(graph, inputs, **kwargs)
            # A compiled backward reads weights, which is not a touch by the user. The nodes of
            # every graph are counted.
            index, backward = captured.index, captured.kind is GraphKind.BACKWARD
            return compiling.boxed_within(lambda: alive()._around(index, pair, backward), compiled)

        def timed_compile(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            backward = _kind(kwargs) is GraphKind.BACKWARD
            with alive()._timed(Phase.COMPILE_BACKWARD if backward else Phase.COMPILE_FORWARD):
                return inner_compile(graph, inputs, **kwargs)

        with self._timed(Phase.COMPILE_FORWARD), compiling.autograd_cache_off():
            traced = example_inputs if copies is None else _traced_with(example_inputs, copies.copies)
            compiled: Callable[..., Any] = compiling.compile_fx(gm, traced, timed_compile, patches)
        return PairGraphs(self._alive, pair, pair.instances[0], compiled, copies)

    def _new_instance(self, row_of: Mapping[int, int]) -> Instance:
        self._pairs += 1
        return Instance(self._pairs - 1, row_of)

    def run(self, instance: Instance, compiled: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Call what was compiled with this set of parameters."""
        results, node = self._running.call(instance, compiled, inputs)
        self._ran(node)
        return results

    @contextlib.contextmanager
    def _around(self, index: int, pair: Pair, backward: bool) -> Iterator[compiling.Edit | None]:
        instance = self._running.one_of(pair.instances, backward=backward)
        around = self._around_backward if backward else self._around_forward
        with self._running.within(instance), around(instance.graph(index)) as edit:
            yield edit

    def _shared_with(self, pair: Pair, rows: RowsOfInputs) -> Instance | None:
        """The set of these rows, which from now on runs the pair's graphs too.

        None where it is of another form, or a hook of the user wants gradients of its own.
        """
        row_of = None if self._share is None else rows_alike(pair.row_of_input, rows, self._unit_of)
        if row_of is None or any(has_user_hooks(self.parameters[row]) for pairs in row_of.items() for row in pairs):
            return None
        instance = self._new_instance(row_of)
        for graph in [graph for graph in self.graphs if graph.index in pair.graphs]:
            self._run_as_well(graph, instance)
        pair.instances.append(instance)  # last: an error leaves none that is half known
        return instance

    def _run_as_well(self, graph: CompiledGraph[R], instance: Instance) -> None:
        """Keep what a graph is for this set too, under a number of its own."""
        assert self._share is not None
        index, self._captured = self._captured, self._captured + 1
        instance.graph_of[graph.index] = index
        its = graph.run_by(instance, index, self._unit_of)
        if graph.kind is not GraphKind.BACKWARD:
            self._used.update(dict.fromkeys(its.units))
        self.graphs.append(replace(its, rewrite=self._share(graph, index, instance)))

    @property
    def _alive(self) -> Callable[[], Capture[R]]:
        """A function that gives this capture without keeping it alive.

        It raises EngineError once the model is closed or gone.
        """
        found = weakref.ref(self)

        def alive() -> Capture[R]:
            capture = found()
            if capture is None:
                raise EngineError("a graph of a model that was closed or dropped was called; compile the model again")
            return capture

        return alive

    def _on_graph(self, module: fx.GraphModule, pair: Pair, kind: GraphKind) -> CapturedGraph:
        graph = self._captured_graph(module, pair, kind)
        units: tuple[int, ...] = ()
        if kind is not GraphKind.BACKWARD:
            pair.saved_views = saved_views(graph)
            units = first_use_order(graph, self._unit_of)
            self._used.update(dict.fromkeys(units))
        flops, masks = unit_flops(graph, self._unit_of), masks_of_positions(module.graph) if kind is GraphKind.FORWARD else 0
        started = time.perf_counter()
        result = self._rewrite(graph)
        seconds = time.perf_counter() - started
        rows, grad_rows = graph.held_rows, tuple(sorted(graph.grads))
        made = CompiledGraph(graph.index, graph.pair, kind, rows, grad_rows, graph.kept_grads, units, flops, masks, result, seconds)
        self.graphs.append(made)
        pair.graphs.append(graph.index)
        for instance in pair.instances[1:]:
            self._run_as_well(made, instance)
        return graph

    def _captured_graph(self, module: fx.GraphModule, pair: Pair, kind: GraphKind) -> CapturedGraph:
        weights: dict[int, fx.Node] = {}
        views: dict[int, list[fx.Node]] = {}
        for node in module.graph.find_nodes(op="placeholder"):
            index = compiling.plain_input(node.meta.get("desc"))
            if index in pair.row_of_input:
                weights.setdefault(pair.row_of_input[index], node)
            elif kind is GraphKind.BACKWARD and node.name in pair.saved_views:
                views.setdefault(pair.saved_views[node.name], []).append(node)
        if kind is not GraphKind.BACKWARD:
            self._check_all_found(pair, weights)
        grads, kept = self._gradients(module, pair) if kind is GraphKind.BACKWARD else ({}, {})
        index, self._captured = self._captured, self._captured + 1
        outputs: tuple[Any, ...] = tuple(module.graph.output_node().args[0])  # type: ignore[arg-type]
        frozen_views = {row: tuple(nodes) for row, nodes in views.items()}
        return CapturedGraph(index, pair.number, kind, module, weights, outputs, frozen_views, grads, kept)

    def _gradients(self, module: fx.GraphModule, pair: Pair) -> tuple[dict[int, int], dict[int, str]]:
        output = module.graph.output_node()
        values: Sequence[Any] = output.args[0]  # type: ignore[assignment]
        descs: Sequence[object] | None = output.meta.get("desc")
        if descs is None or len(descs) != len(values):
            raise CaptureError(
                f"the backward graph of pair {pair.number} does not say which output is which gradient (meta['desc'] of "
                f"{len(values)} outputs is {descs!r}); torch {torch.__version__} is not supported, use torch 2.11 to 2.13"
            )
        grads: dict[int, int] = {}
        kept: dict[int, str] = {}
        for position, (value, desc) in enumerate(zip(values, descs, strict=True)):
            index = compiling.gradient_of(desc)
            if index not in pair.row_of_input or not isinstance(value, fx.Node):
                continue
            row = pair.row_of_input[index]
            if any(has_user_hooks(self.parameters[instance.rows([row])[0]]) for instance in pair.instances):
                kept[row] = "it has a gradient hook" + (", or one in its place in another block" if len(pair.instances) > 1 else "")
            else:
                grads[row] = position
        return grads, kept

    def _check_all_found(self, pair: Pair, weights: Mapping[int, fx.Node]) -> None:
        missing = sorted(set(pair.row_of_input.values()) - set(weights))
        if missing:
            raise CaptureError(
                f"parameter {self.names[missing[0]]!r} ({type(self.parameters[missing[0]]).__name__}) is an input of pair "
                f"{pair.number} but no placeholder of its forward graph holds it; expected a plain dense Parameter"
            )


def _traced_with(inputs: Sequence[Any], copies: Mapping[int, torch.Tensor]) -> Sequence[Any]:
    if not copies:
        return inputs
    return [traced_form(copies[i], requires_grad=e.requires_grad) if i in copies else e for i, e in enumerate(inputs)]


def _kind(kwargs: Mapping[str, Any]) -> GraphKind:
    if kwargs.get("is_backward"):
        return GraphKind.BACKWARD
    return GraphKind.INFERENCE if kwargs.get("is_inference") else GraphKind.FORWARD


def _refuse_cudagraphs(wanted: object) -> None:
    if bool(getattr(wanted, "value", wanted)):
        raise UnsupportedError(
            "CUDA graphs are on (mode='reduce-overhead', mode='max-autotune' or options={'triton.cudagraphs': True}); the inserted nodes "
            "act on the host at each run, so use mode=None or mode='max-autotune-no-cudagraphs'"
        )
