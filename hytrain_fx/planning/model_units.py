"""The units of one model as the planner sees them: in forward order, with sizes, floating-point operations and rows of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hytrain_fx.capture import units
from hytrain_fx.capture.backend import Capture
from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.ir.plan import Placement, Plan, validate
from hytrain_fx.ir.task_graph import TaskGraph, Unit, build_task_graph
from hytrain_fx.runtime.states.store import StateStore


class ModelUnits:
    """Calling it gives the units as they are known now.

    capture    the model's graphs, from when they can be captured on: the forward's order and the operations come from them
    """

    capture: Capture[Any] | None = None

    def __init__(self, table: ParameterTable, registered: Sequence[units.Unit], states: StateStore) -> None:
        self._table = table
        self._registered = registered
        self._states = states

    def __call__(self) -> tuple[Unit, ...]:
        """Forward order once a forward graph is captured, order of registration before."""
        order = tuple(unit.number for unit in self._registered) if self.capture is None else self.capture.unit_order
        return tuple(self._unit(index, number) for index, number in enumerate(order))

    def task_graph(self) -> TaskGraph:
        """The layer-level DAG of a step, with sizes and floating-point operations."""
        return build_task_graph(self())

    def rows_of(self, unit: Unit) -> tuple[int, ...]:
        """Rows of its parameters, in the unit's order."""
        names = self._table.names
        return tuple(names.index(name) for name in unit.param_names)

    def placement_of(self, plan: Plan) -> list[Placement]:
        """Placement by row: of the share that holds the row's first element (shares of our own plans end between rows).

        Raises PlanError where the plan is not of these units.
        """
        units = self()
        validate(plan, units)
        placement = [Placement.CPU] * len(self._table)
        for unit in units:
            at, shares = 0, plan.shares(unit.index)
            for row, numel in zip(self.rows_of(unit), unit.param_numels, strict=True):
                placement[row] = next(share.placement for share in shares if share.begin <= at < share.end)
                at += numel
        return placement

    def _unit(self, index: int, number: int) -> Unit:
        unit = self._registered[number]
        numels = tuple(self._table.parameters[row].numel() for row in unit.rows)
        flops = {"forward": 0.0, "backward": 0.0}
        for graph in () if self.capture is None else self.capture.graphs:
            if graph.kind in flops:
                flops[graph.kind] = max(flops[graph.kind], graph.unit_flops.get(number, 0.0))
        return Unit(
            index=index,
            name=unit.name or "(model)",
            params=sum(numels),
            param_names=tuple(self._table.names[row] for row in unit.rows),
            param_numels=numels,
            grad_bytes=sum(map(self._states.travelling_bytes, unit.rows)),
            forward_flops=flops["forward"],
            backward_flops=flops["backward"],
        )
