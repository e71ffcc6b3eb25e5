"""The compiled graphs of one session.

They are given their nodes when they are captured, and watched while they run.

    rewrite            a graph has been captured: its nodes, the rows and calls it has, units
                       numbered in forward order
    around_backward    a compiled backward runs: each of its nodes must, and gradients may be wanted
                       elsewhere than in `.grad`
    must_capture_anew  a hook has come to a gradient that the graphs keep to themselves, or other
                       passes are to run
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from hytrain_fx.capture.backend import Capture
from hytrain_fx.capture.captured_graph import CapturedGraph, CompiledGraph, GraphKind
from hytrain_fx.capture.casts import InputCopies
from hytrain_fx.capture.handed_out import rows_handed_out
from hytrain_fx.capture.instance_graphs import Instance
from hytrain_fx.capture.kept_activations import kept_bytes
from hytrain_fx.capture.pairs import has_user_hooks
from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.capture.units import Unit, unit_of_rows
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.gradients.destinations import Elsewhere, GradDestinations, with_gradients
from hytrain_fx.ir.pass_record import PipelineRecord
from hytrain_fx.ir.startup import Phase
from hytrain_fx.passes.base import GraphPass
from hytrain_fx.passes.graph_dump import GraphDump
from hytrain_fx.passes.insert_fetches import fetching_calls
from hytrain_fx.passes.insert_grad_offload import offloading_calls
from hytrain_fx.passes.insert_waits import waited_rows
from hytrain_fx.passes.pipeline import are_own, rewrite
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.runtime.side_stream import BackwardStreams
from hytrain_fx.runtime.states.pieces import PieceRows
from hytrain_fx.session.callbacks import weakly
from hytrain_fx.session.eager_reads import EagerReads
from hytrain_fx.session.nodes import SessionNodes
from hytrain_fx.torch_private.autograd import reading_save_hook, running_node
from hytrain_fx.torch_private.compiling import Edit
from hytrain_fx.torch_private.tensors import any_tensor_hooks, count_accumulate_hooks, without_torch_function
from hytrain_fx.weights.autocast_copies import AutocastCopies
from hytrain_fx.weights.streamed_weights import StreamedWeights


class SessionGraphs:
    """Captures, rewrites and watches the graphs.

    session    number by which the nodes find it
    plain      entered with the weights that a compiled backward may read while it runs: that is no
               touch by eager code
    reads      of eager code: entered while any compiled graph runs, whose reads are none of them
    phase      times the parts of a compilation
    passes     run on each graph, those that are for its kind
    dump       folder for the texts of graphs; one that cannot be written raises ConfigError
    copies     whose 16-bit weights the graphs may read, None where they never do
    streamed   weights that rest on the host
    noticed    entered around each compiled backward: told that memory runs out
    numbered   called after units have been given their places in the forward's order
    """

    def __init__(
        self,
        session: int,
        table: ParameterTable,
        units: Sequence[Unit],
        pieces: PieceRows,
        nodes: SessionNodes,
        plain: Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]],
        reads: EagerReads,
        noticed: Callable[[], AbstractContextManager[None]],
        numbered: Callable[[], None],
        phase: Callable[[Phase], AbstractContextManager[None]],
        copies: AutocastCopies | None,
        streamed: StreamedWeights,
        passes: Sequence[GraphPass],
        dump: str | Path | None,
    ) -> None:
        self._session = session
        self._table = table
        self._units = units
        self._pieces = pieces
        self._nodes = nodes
        self._plain = plain
        self._in_graph = reads.in_graph
        reads.on_first = weakly(self._read_eagerly)
        self._noticed = noticed
        self._numbered = numbered
        self._passes = passes
        self._dump = None if dump is None else GraphDump(dump)
        self._destinations = GradDestinations(table.parameters)
        self._grads: dict[int, Mapping[int, int]] = {}  # by backward graph: row -> position of its gradient in the outputs
        self._inputs: dict[int, tuple[nn.Parameter, ...]] = {}  # by pair: the parameters that its forward is given
        self._read: dict[int, tuple[nn.Parameter, ...]] = {}  # by backward graph: those that may be saved for it
        self._fetches: dict[int, tuple[tuple[tuple[int, ...], int], ...]] = {}  # by graph: what it reads, and after how many gradients
        self._streams = BackwardStreams(table.device)
        self._copies = copies
        self._streamed = streamed
        self._kept_bytes: dict[int, dict[int, int]] = {}  # by backward graph, and number of a unit
        self._anew = False  # whether all is to be captured again
        self._kept: dict[int, nn.Parameter] = {}  # by row: parameters whose gradients the graphs do not return
        self._own_hooks = 0  # post-accumulate hooks on these, when they were last looked at
        self.capture: Capture[PipelineRecord] = Capture(
            table.names, table.parameters, units, self._rewrite, self._around_backward, self._around_forward, self._call, phase,
            self._copies_for, nodes.gradients.parts.forward_ran, nodes.running, self._share if are_own(passes) else None)

    def _copies_for(self, gm: fx.GraphModule, inputs: Sequence[Any], row_of_input: Mapping[int, int]) -> InputCopies | None:
        if self._streamed.wanted:
            self._streamed.keep(rows_handed_out(gm, row_of_input))
        return None if self._copies is None else self._copies.copies_for(gm, inputs, row_of_input)

    def _rewrite(self, graph: CapturedGraph) -> PipelineRecord:
        kept = kept_bytes(graph, unit_of_rows(self._units)) if graph.kind is GraphKind.BACKWARD else {}
        record = rewrite(graph, session=self._session, units=self._units, passes=self._passes, dump=self._dump)
        self._fetches[graph.index] = fetching_calls(graph.module)
        if graph.kind is GraphKind.BACKWARD:
            self._kept_bytes[graph.index] = kept
            self._note_backward(graph.index, graph.pair, graph.grads, offloading_calls(graph.module))
            self._require_own_hooks(graph.kept_grads)
        else:
            self._note_forward(graph.index, graph.pair, graph.weights, waited_rows(graph.module))
        return record

    def _share(self, graph: CompiledGraph[PipelineRecord], index: int, instance: Instance) -> PipelineRecord:
        """Another set of parameters runs this graph's code, as graph number `index`."""
        nodes, row_of, unit = self._nodes, instance.row_of, instance.units(unit_of_rows(self._units))
        self._fetches[index] = tuple((tuple(instance.rows(rows)), gradients) for rows, gradients in self._fetches[graph.index])
        if graph.kind is GraphKind.BACKWARD:
            self._kept_bytes[index] = {unit[of]: nbytes for of, nbytes in self._kept_bytes[graph.index].items()}
            grads = {row_of[row]: position for row, position in self._grads[graph.index].items()}
            self._note_backward(index, instance.pair, grads, tuple(tuple(instance.rows(rows)) for rows in nodes.graph_calls[graph.index]))
        else:
            self._note_forward(index, instance.pair, instance.rows(graph.rows), nodes.graph_waits[graph.index])
        self._require_own_hooks(row_of[row] for row in graph.kept_grads)
        record = graph.rewrite.of_other_rows(row_of, unit, index, f"{graph.index:02}.{graph.kind}")
        if self._dump is not None:
            for number, one in enumerate(record.passes):
                self._dump.write(f"{index:02}.{graph.kind}", number, one)
        return record

    def _require_own_hooks(self, kept: Iterable[int]) -> None:
        """Have all captured again if a gradient is kept that has no hook itself.

        It is kept because a parameter that shares its graph had one.
        """
        self._anew |= not all(has_user_hooks(self._table.parameters[row]) for row in kept)

    def _note_backward(self, graph: int, pair: int, grads: Mapping[int, int], calls: tuple[tuple[int, ...], ...]) -> None:
        self._read[graph] = self._inputs[pair]
        self._nodes.graph_rows[graph] = frozenset(grads)
        self._nodes.captured_rows |= frozenset(grads)
        self._nodes.graph_calls[graph] = calls
        self._grads[graph] = grads
        self._kept.update((row, self._table.parameters[row]) for row in grads)

    def _note_forward(self, graph: int, pair: int, rows: Iterable[int], waits: int) -> None:
        self._inputs[pair] = tuple(self._table.parameters[row] for row in rows)
        self._nodes.graph_waits[graph] = waits
        self._number_units()

    @property
    def kept_bytes(self) -> tuple[int, ...]:
        """By unit, in the forward's order: the most that any forward keeps for its backward."""
        return tuple(max((of.get(number, 0) for of in self._kept_bytes.values()), default=0) for number in self.capture.unit_order)

    @whole()
    def _read_eagerly(self, unit: int) -> None:
        if self.capture.next_in_order(unit):
            self._number_units()

    def _number_units(self) -> None:
        """Units count in forward order from here on.

        It is the order in which new weights are due.
        """
        for index, number in enumerate(self.capture.unit_order):
            for row in self._units[number].rows:
                self._nodes.unit_of[row] = index
                if self._pieces.unit(row) != index:
                    self._pieces.set_unit(row, index)
        self._numbered()

    def capture_anew(self, passes: Sequence[GraphPass]) -> None:
        """Have every graph captured again, and these passes run on it."""
        self._passes, self._anew = passes, True

    def must_capture_anew(self) -> bool:
        """Whether a user's hook has come to a parameter whose gradient no graph returns.

        The hook would see None. Or whether that was asked for (`capture_anew`).

        Answers once: the graphs that are captured next return it.
        """
        with without_torch_function():
            if not self._anew and not any_tensor_hooks(self._kept.values()) and not self._users_hooks_came():
                return False
        self._anew, self._own_hooks = False, 0
        self._kept.clear()
        return True

    def _users_hooks_came(self) -> bool:
        """Whether any post-accumulate hook is a user's: looked at where there are more or fewer.

        Ours only become more.
        """
        count = count_accumulate_hooks(self._kept.values())
        if count != self._own_hooks and any(map(has_user_hooks, self._kept.values())):
            return True
        self._own_hooks = count
        return False

    def _call(self, compiled: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        self._show_to_save_hook(inputs)
        with self._in_graph():
            return compiled(*inputs)

    def _show_to_save_hook(self, inputs: Iterable[Any]) -> None:
        """A graph with these inputs is about to run: a hook on saved tensors finds its weights.

        Autograd saves weights and views of weights when their graph has run and its slots are given
        away. A hook that copies them then (`save_on_cpu`) would find no memory. And what it gives
        back to the backward is another tensor, under which no fetch puts anything. So the weights
        are in memory of their own before, until a training forward finds that nobody holds them.

        Raises OutOfMemoryError where the device has no room for all, RankError and UnsupportedError
        as `StreamedWeights.fill`.
        """
        if not self._streamed.wanted or not torch.is_grad_enabled() or (hook := reading_save_hook()) is None:
            return
        rows = [self._table.row_of[id(value)] for value in inputs if id(value) in self._table.row_of]
        try:
            with self._streamed.units.held():
                self._streamed.fill(rows)
        except torch.OutOfMemoryError as error:
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            error.add_note(f"hooks on saved tensors are set ({name}), which read weights too: all that a graph reads are on the device "
                           "while they are. Leave the hooks out, or use torch.utils.checkpoint, whose hooks read none")
            raise

    @contextmanager
    def _around_forward(self, graph: int) -> Iterator[None]:
        fetches = self._nodes.fetched.running(graph, self._fetches[graph], evaluates=self._nodes.marks.is_silent)
        with fetches, self._nodes.all_waited(graph):
            yield

    @contextmanager
    def _around_backward(self, graph: int) -> Iterator[Edit | None]:
        """While a compiled backward runs, its own reading of weights is not a touch.

        What it may not overtake, its nodes say.

        Gives what puts gradients among the results that autograd does not add to `.grad` but
        returns (torch.autograd.grad). Raises DroppedNodeError where a node of it did not run,
        UnsupportedError for a tensor hook that came after the forward.
        """
        rows = self._nodes.graph_rows[graph]
        with without_torch_function():
            self._require_no_hooks(rows)
            elsewhere = self._destinations.elsewhere(rows)
        self._streams.graph_begins()
        self._nodes.gradients.parts.backward_runs(running_node())
        if shared := self._nodes.gradients.parts.of_autograd & rows:
            elsewhere = Elsewhere(elsewhere.returned | (shared - elsewhere.unwanted), elsewhere.unwanted)
        reading = self._nodes.fetched.running(graph, self._fetches[graph], backward=True)
        with self._noticed(), self._plain(self._read[graph]), self._in_graph(), reading, self._nodes.all_run(graph, elsewhere):
            if not elsewhere:
                with self._nodes.fetching_ahead(graph):
                    yield None
            else:
                with self._nodes.returned.returning(elsewhere) as returned:
                    yield partial(with_gradients, self._grads[graph], returned)

    def _require_no_hooks(self, rows: Iterable[int]) -> None:
        if not any_tensor_hooks([self._table.parameters[row] for row in rows]):
            return
        late = next(row for row in rows if any_tensor_hooks([self._table.parameters[row]]))
        raise UnsupportedError(
            f"a gradient hook was registered on {self._table.names[late]!r} between the forward and its backward, whose compiled "
            "graph does not return this gradient; register hooks before the forward"
        )
