"""What the inserted nodes do in one session.

They take gradients, arm updates, release weights and wait for them; runs are marked and counted.

    grad_offload   each gradient goes to the engine or into `.grad` (gradients/taking.py); one that
                   autograd takes elsewhere (torch.autograd.grad) is kept, for the graph to return
    all_run        every node that a backward graph was compiled with has run: otherwise the
                   compiler has dropped it
    all_waited     the same of a forward graph
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from hytrain_fx.capture.instance_graphs import Running
from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.capture.units import Unit
from hytrain_fx.errors import DroppedNodeError
from hytrain_fx.gradients.averaging import AveragedGradients
from hytrain_fx.gradients.destinations import Elsewhere, ReturnedGradients
from hytrain_fx.gradients.gathering import gradients_of
from hytrain_fx.planning.marks import Mark, StepMarks
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.runtime.ranks import Ranks
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.session.rank_gradients import RankGradients
from hytrain_fx.weights.gathered import GatheredWeights
from hytrain_fx.weights.gathered_units import units_of


class SessionNodes:
    """Implements `ops.StepNodes` for one session."""

    def __init__(
        self, table: ParameterTable, engine: Engine, states: StateStore, marks: StepMarks, ranks: Ranks | None = None,
        units: Sequence[Unit] = (), *, streams: bool = False, micro_batches: int = 1
    ) -> None:
        self.table = table
        self.averaged = AveragedGradients(ranks, table) if ranks else None
        self.gathered = GatheredWeights(ranks, table, units, engine, states) if ranks and table.shards else None
        if self.averaged and self.gathered:
            self.averaged.shards.weights_first = self.gathered.all
        times = ranks.times if ranks else None
        self.fetched = units_of(table, engine, states, units, lambda: marks.held("fetch"), times, self.gathered, streams)
        shards = self.averaged.shards if self.averaged and table.shards else None
        self.gradients = gradients_of(table, engine, states, shards, micro_batches)
        self.gradients.parts.ranks_average = self.averaged is not None
        self.of_ranks = (RankGradients(self.averaged, self.gathered, self.gradients, table, self._arm, self._end_updates, self.fetched)
                         if self.averaged else None)
        self.running = Running()
        self.runs: Counter[str] = Counter()  # how often each kind of node ran, in rows
        self.gradients_outside = 0  # made by no graph, as far as autograd tells of them
        self.graph_rows: dict[int, frozenset[int]] = {}  # rows that each backward graph offloads
        self.captured_rows: frozenset[int] = frozenset()  # rows that any backward graph offloads
        self.graph_calls: dict[int, tuple[tuple[int, ...], ...]] = {}  # the same, node by node in the order of the graph
        self.graph_waits: dict[int, int] = {}  # rows that each forward graph waits for
        self.unit_of: list[int] = [0] * len(table)
        self._engine = engine
        self._states = states
        self.marks = marks
        self._offloaded: set[int] = set()
        self.returned = ReturnedGradients()
        self._unwaited: set[int] = set()  # rows of the last steps whose new weights no forward has waited for yet

    @property
    def backwards(self) -> int:
        """A number that grows with each backward, of a graph or of code outside the graphs."""
        return self.runs["backward_end"] + self.gradients_outside

    # ---- the nodes ----

    @whole()  # an engine in Python holds locks and takes memory in several lines
    def grad_offload(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Take the gradients of `rows`, in the parameters' shapes. Their buffers die after it."""
        self._take(rows, grads)

    def _take(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        self.marks.mark(Mark.GRADS, self.unit_of[rows[0]])
        self._offloaded.update(rows)
        self.runs["grad_offload"] += len(rows)
        self.fetched.cover(rows)
        if self._unwaited and not self._unwaited.isdisjoint(rows):  # a backward that comes after the step() that its forward came before
            self._end_updates(rows)
        call, group = rows, self.gradients.groups[rows]
        group.place(self._states)  # the nodes after this one go by it, whichever of its gradients are taken
        if self.returned.elsewhere:
            rows, grads = self.returned.keep(rows, grads)
            group = self.gradients.groups[rows]
            group.place(self._states)
        if self.of_ranks:
            self.of_ranks.take(call, grads)
        else:
            self.gradients.take(group, grads)

    @whole()
    def cpu_step(self, rows: Sequence[int]) -> None:
        """Arm the CPU update of rows placed on the host."""
        self._arm(rows, gpu=False, reload=False)
        self.runs["cpu_step"] += len(rows)

    @whole()
    def gpu_step(self, rows: Sequence[int]) -> None:
        """Arm the update on the device of rows placed there."""
        self._arm(rows, cpu=False, reload=False)
        self.runs["gpu_step"] += len(rows)

    @whole()
    def reload(self, rows: Sequence[int]) -> None:
        """Arm the copy of the new weights of rows placed on the host."""
        self._arm(rows, cpu=False, gpu=False)
        self.runs["reload"] += len(rows)

    @whole()
    def offload_and_step(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """What a unit's four nodes do, with what they have in common done once."""
        self._take(rows, grads)
        self._arm(rows)
        for kind in ("cpu_step", "gpu_step", "reload"):
            self.runs[kind] += len(rows)

    def _arm(self, rows: Sequence[int], *, cpu: bool = True, gpu: bool = True, reload: bool = True) -> None:
        if self.gradients.stay or (self.of_ranks is not None and self.of_ranks.holds(rows)):
            return
        group = self.gradients.groups[rows]
        if cpu and group.on_host:
            self._engine.arm_cpu(group.pieces)
        if gpu and group.on_device:
            with self.averaged.side.inside() if self.averaged else nullcontext():  # where the gradients were taken
                self._engine.arm_gpu(group.pieces)
        if reload and group.on_host:
            self._engine.arm_reload(group.pieces)

    @whole()
    def release(self, rows: Sequence[int]) -> None:
        """The compute stream has, at this point, read these weights for the last time."""
        self._engine.release(self._states.pieces.rows(rows))
        self.runs["release"] += len(rows)
        self.fetched.let_go(rows)

    @whole()
    def backward_end(self, graph: int, rows: Sequence[int]) -> None:
        """Release the rest and check the count. Raises DroppedNodeError."""
        missing = self.graph_rows.get(graph, frozenset()) - self._offloaded
        if missing:
            names = ", ".join(self.table.names[row] for row in sorted(missing)[:3])
            raise DroppedNodeError(
                f"backward graph {graph} ended but {len(missing)} of its gradients were never offloaded ({names}, ...); "
                "an inserted node was dropped by the compiler: please report this with the torch version"
            )
        self._offloaded -= self.graph_rows.get(graph, frozenset())
        if rows:
            self.release(rows)
        if self.averaged:
            self.averaged.side.join()
        self.marks.mark(Mark.BACKWARD_END)
        self.runs["backward_end"] += 1

    @whole()
    def wait(self, rows: Sequence[int]) -> None:
        """Return when the compute stream will see the committed weights of `rows`."""
        self.wait_outside(rows)
        self.fetched.fetch(rows)

    @whole()
    def fetch(self, rows: Sequence[int]) -> None:
        """Have streamed weights of `rows` on the device, for what is launched from now on."""
        self.runs["fetch"] += len(rows)
        self.fetched.fetch(rows)

    @whole()
    def let_go(self, rows: Sequence[int]) -> None:
        """The forward graph has read these weights."""
        self.runs["let_go"] += len(rows)
        self.fetched.let_go(rows)

    def wait_outside(self, rows: Sequence[int]) -> None:
        """`wait` of code outside graphs."""
        unit = self.unit_of[rows[0]]
        self.marks.mark(Mark.WAIT_BEGIN, unit)
        self._end_updates(rows)
        self.marks.mark(Mark.WAIT_END, unit)
        self.runs["wait"] += len(rows)

    def _end_updates(self, rows: Sequence[int]) -> None:
        self._engine.wait(self._states.pieces.rows(rows))
        if self.gathered:
            self.gathered.of(rows)
        self._unwaited.difference_update(rows)
        if self.gradients.held:
            self.gradients.held.let_go(rows)

    def before_step(self, eager: AbstractSet[int]) -> None:
        """A `step()` begins. `eager`: rows that code outside the graphs has given a gradient.

        Raises RankError, and UnsupportedError for a gradient that is this rank's own.
        """
        if self.averaged:
            self.averaged.require_all(eager)
        if self.gathered:
            self.gathered.all()

    def committed(self, rows: Collection[int]) -> None:
        """A `step()` has begun the updates of these rows."""
        self._unwaited.update(rows)
        if self.gathered:
            self.gathered.updated(rows)

    @contextmanager
    def all_waited(self, graph: int) -> Iterator[None]:
        """Around one run of a compiled forward graph.

        Raises DroppedNodeError where it ends and has not waited for every row it reads.
        """
        before = self.runs["wait"]
        yield
        ran, expected = self.runs["wait"] - before, self.graph_waits[graph]
        if ran < expected:
            raise _dropped("forward", graph, "wait", ran, expected)

    # ---- around one run of a backward graph ----

    @contextmanager
    def all_run(self, graph: int, elsewhere: Elsewhere) -> Iterator[None]:
        """Around one run of a compiled backward graph, some of whose gradients go elsewhere.

        Raises DroppedNodeError where it ends and fewer rows were counted than it offloads.

        Releases are not counted: `step()` makes up for one that is lost.
        """
        if self.gathered:
            self.gathered.all()
        if self.of_ranks:
            self.of_ranks.begin(self.graph_calls[graph], elsewhere.returned | elsewhere.unwanted)
        before = self.runs.copy()
        self._offloaded.clear()  # by a graph that ended in an error
        self.gradients.forget_fresh()
        try:
            with self.gradients.all_or_none(self.graph_rows[graph]):
                yield
                self._require_all_ran(graph, before)
        except BaseException as error:
            if self.averaged:
                self.averaged.broken_off(error)
            raise

    def _require_all_ran(self, graph: int, before: Counter[str]) -> None:
        rows = len(self.graph_rows[graph])
        for kind in ("grad_offload", "cpu_step", "gpu_step", "reload", "backward_end"):
            ran, expected = self.runs[kind] - before[kind], min(rows, 1) if kind == "backward_end" else rows
            if ran < expected:
                raise _dropped("backward", graph, kind, ran, expected)

    @contextmanager
    def fetching_ahead(self, graph: int) -> Iterator[None]:
        """Around one run of a backward graph, all of whose gradients go to `.grad`.

        What slots have comes back ahead of its nodes.
        """
        with ExitStack() as ahead:
            with self.averaged.side.beside() if self.averaged else nullcontext():
                ahead.enter_context(self.gradients.fetching_ahead(self.graph_calls[graph]))
            yield


def _dropped(direction: str, graph: int, kind: str, ran: int, expected: int) -> DroppedNodeError:
    return DroppedNodeError(
        f"{direction} graph {graph} ran {kind} for {ran} rows, expected {expected}; an inserted node was dropped by the compiler: "
        "please report this with the torch version"
    )
