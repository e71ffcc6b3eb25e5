"""Units of sharded weights in slots of the device: each comes from all ranks.

Each run of a graph gathers each of its units once, in an order that the ranks have agreed on
(gather_order.py). Nothing of one rank alone decides whether: not what a slot still has, nor whether
updates have ended, nor who holds a parameter's memory. The launching thread waits instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.capture.units import Unit
from hytrain_fx.errors import EngineError
from hytrain_fx.ir.task_graph import TaskKind
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.lane_times import LaneTimes
from hytrain_fx.runtime.states.pieces import flat_alias
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.torch_private.tensors import without_torch_function
from hytrain_fx.weights.device_slots import wait_for
from hytrain_fx.weights.fetched_unit import FetchedUnit, GraphRun
from hytrain_fx.weights.fetched_units import FetchedUnits
from hytrain_fx.weights.gather_order import GatherOrder
from hytrain_fx.weights.gathered import GatheredWeights


class GatheredUnits(FetchedUnits):
    """Those of one session.

    gathered   the weights of all ranks
    wish       how many units ahead this rank would bring. They all bring the fewest that any wishes
    whole      rows that all ranks have had gathered for the loop, and keep (`is_whole`): no graph
               gathers them
    """

    def __init__(
        self, table: ParameterTable, engine: Engine, states: StateStore, units: Sequence[Unit],
        held: Callable[[], AbstractContextManager[None]], times: LaneTimes | None, gathered: GatheredWeights,
    ) -> None:  # fmt: skip
        super().__init__(table, engine, states, units, held, times, wanted=True)
        self.gathered = gathered
        self.wish = self.ahead
        self.whole: set[int] = set()

    # ---- while graphs run ----

    def _begin_run(self, calls: Sequence[tuple[Sequence[int], int]]) -> GraphRun:
        """The ranks compare what they gather in it. Raises RankError where they differ."""
        found: dict[int, int] = {}
        for rows, gradients in calls:
            for row in rows:
                if row in self._of and not self.is_whole(row):
                    found.setdefault(self._unit_of[row], gradients)
        if found:
            told = tuple(f"{self._name(unit)}, after {gradients} gradients" for unit, gradients in found.items())
            agreed = self.gathered.agree_ahead("the weights that a graph reads", told, self.wish)
            if agreed != self.ahead and getattr(self._runs, "now", None) is None:
                self.look_ahead(agreed)
            self.wish = agreed
        return GraphRun(GatherOrder(list(found), list(found.values()), self.ahead))

    def _name(self, unit: int) -> str:
        rows = [row for row in self._units[unit].rows if not self.is_whole(row)]
        return f"{self._table.names[rows[0]]} and {len(rows) - 1} more"

    def _end_run(self, run: GraphRun) -> None:
        super()._end_run(run)
        assert run.order
        with self.lock:
            for number in run.order.begun:  # after an error its node has not come
                self._give_unused(self._units[number])

    def before_turn(self) -> None:
        """Gradients are about to go from rank to rank: units that come before them do first."""
        run: GraphRun | None = getattr(self._runs, "now", None)
        if run is not None and run.order:
            with self.lock, torch.no_grad(), without_torch_function():
                for number in run.order.before_turn():
                    self._gather(self._units[number], run)

    def gradients_of_run(self, sent: Sequence[bool], alike: bool) -> None:
        """Of the nodes of this run that make gradients, in order, these send them.

        `alike`: whether all ranks send the same. Raises RankError as `GatherOrder.only` does.
        """
        run: GraphRun | None = getattr(self._runs, "now", None)
        if run is not None and run.order:
            run.order.only(sent, alike)

    def _bring(self, unit: FetchedUnit, run: GraphRun) -> None:
        assert run.order
        for number in run.order.needed(unit.number):
            self._gather(self._units[number], run)
        away, behind = self._missing(unit)
        if behind or (away and (unit.slot is None or not unit.slot.holds)):
            raise EngineError(f"internal: {self._name(unit.number)} were not gathered for the graph that reads them")
        if away and unit.slot is not None:
            self._pool.use(unit.slot)
        wait_for(unit.copied, self._table.device)

    def _bring_ahead(self, after: int, run: GraphRun) -> None:
        """What is ahead comes with what is needed."""

    def _gather(self, unit: FetchedUnit, run: GraphRun) -> None:
        """Put the weights of a unit on the lane, of every rank's shards.

        All ranks do so at this place of their order, whatever each has of them by now.
        """
        rows = tuple(row for row in unit.rows if not self.is_whole(row))
        away, behind = self._missing(unit)
        if away and unit.slot is not None and unit.slot.holds and unit.uses:  # another graph is reading them
            away = []
        if away and unit.slot is None:
            self._settle_in(unit, self._pool.take(unit.nbytes))
        elif away and unit.slot is not None:
            self._pool.use(unit.slot)
        slot = unit.slot if away else None
        with self._lane.current(self._lane.present(), slot.free if slot is not None else None):
            self._engine.wait(self._states.pieces.rows(rows))
            wholes = []
            for row in rows:
                begin, nbytes = unit.rows[row], self.nbytes(row)
                if row in away and slot is not None:
                    wholes.append(slot.memory[begin : begin + nbytes].view(torch.bfloat16))
                elif row in behind:
                    wholes.append(flat_alias(self._table.parameters[row].detach()))
                else:
                    wholes.append(torch.empty(nbytes // 2, dtype=torch.bfloat16, device=self._table.device))
                self.bytes_fetched += nbytes
            self.gathered.bring(rows, wholes, TaskKind.GATHER_BACKWARD if run.backward else TaskKind.GATHER_FORWARD)
            unit.copied, unit.covered, unit.updated = self._lane.point(), False, True
        self._place(unit, away)
        for row in behind:
            self._of[row].current = True

    # ---- for the loop ----

    def is_whole(self, row: int) -> bool:
        """Whether every rank has this weight whole, as of the last update or the loop's write."""
        return row in self.whole and self._of[row].current

    def end_updates(self, row: int) -> None:
        """The current stream is to see the last update of a weight's home."""
        self._engine.wait(self._states.pieces.of(row))

    def stays(self, row: int) -> None:
        """Its weight is on the device from now on, in memory of its parameter's own."""
        del self._units[self._unit_of[row]].rows[row]
        self.whole.discard(row)

    def committed(self, rows: Iterable[int]) -> None:
        """As there. Nobody has the new weights whole."""
        rows = list(rows)
        super().committed(rows)
        self.whole.difference_update(rows)


def units_of(
    table: ParameterTable, engine: Engine, states: StateStore, units: Sequence[Unit],
    held: Callable[[], AbstractContextManager[None]], times: LaneTimes | None, gathered: GatheredWeights | None, wanted: bool,
) -> FetchedUnits:  # fmt: skip
    """The units of one session.

    held, times   as `FetchedUnits` has them
    gathered      the weights of several ranks
    wanted        whether weights may be streamed or sharded at all
    """
    if wanted and gathered:
        return GatheredUnits(table, engine, states, units, held, times, gathered)
    return FetchedUnits(table, engine, states, units, held, times, wanted)
