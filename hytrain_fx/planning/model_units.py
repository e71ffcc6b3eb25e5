"""The units of one model as the planner sees them: in forward order, with sizes, floating-point
operations and rows of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hytrain_fx.capture.backend import Capture
from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.capture.units import Unit as RegisteredUnit
from hytrain_fx.ir.plan import Placement, Plan, validate
from hytrain_fx.ir.task_graph import TaskGraph, Unit, build_task_graph
from hytrain_fx.runtime.states.store import StateStore


class ModelUnits:
    """Calling it gives the units as they are known now.

    capture    the model's graphs, from when they can be captured on: the forward's order and the
               operations come from them
    """

    capture: Capture[Any] | None = None

    def __init__(self, table: ParameterTable, registered: Sequence[RegisteredUnit], states: StateStore) -> None:
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

    def of_rows(self) -> list[int]:
        """The index of the unit that each row belongs to."""
        found = [0] * len(self._table)
        for unit in self():
            for row in self.rows_of(unit):
                found[row] = unit.index
        return found

    def placement_of(self, plan: Plan) -> list[Placement]:
        """Placement by row: of the share that holds the row's first element (shares of our own
        plans end between rows).

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
            traffic=self._states.traffic(unit.rows),
            forward_flops=flops["forward"],
            backward_flops=flops["backward"],
        )


# ---- What states and gradients take, on each side and a parameter: the planner's arithmetic of memory, for the model that runs


class StateSizes:
    """Of all rows of one model, wherever their states rest."""

    def __init__(self, parameters: Sequence[nn.Parameter], states: StateStore) -> None:
        self._parameters = parameters
        self._states = states
        self._rows = range(len(parameters))
        self._numel = sum(parameter.numel() for parameter in parameters)

    def device_bytes_per_param(self) -> float:
        """States, and the gradient that stays on the device until its update has run."""
        return (self._states.device_bytes(self._rows) + self._grad_bytes(self._rows)) / self._numel

    def host_bytes_per_param(self) -> float:
        """States on the host and new weights beside them, without slots except for what gradients
        do not fill of them.
        """
        apart = sum(map(self._states.out_bytes, self._rows))
        return (self._states.host_bytes(self._rows, Placement.STREAM) + apart + self.wider_bytes()) / self._numel

    def host_bytes(self, rows: Sequence[int]) -> int:
        """Host memory that these rows take there, with their slots."""
        return self._states.host_bytes(rows)

    def wider_bytes(self) -> int:
        """By how much gradients of rows with 16-bit copies are larger in a slot or on the device
        than on their way.
        """
        return self._grad_bytes(self._rows) - sum(map(self._states.travelling_bytes, self._rows))

    def resident_device_bytes(self) -> int:
        """Device memory that states, and gradients that stay there until their update, take
        already.
        """
        on_device = self._placed(Placement.GPU)
        return self._states.device_bytes(on_device) + self._grad_bytes([*on_device, *self._placed(Placement.STREAM)])

    def resident_host_bytes(self) -> int:
        """Host memory that states, with their slots, take already."""
        return sum(self._states.host_bytes(self._placed(place), place) for place in (Placement.CPU, Placement.STREAM))

    def moved_bytes(self, before: Sequence[Placement], after: Sequence[Placement]) -> int:
        """Bytes of states that change sides; between CPU and STREAM they stay where they are."""
        rows = [row for row in self._rows if (before[row] is Placement.GPU) != (after[row] is Placement.GPU)]
        return self._states.host_bytes(rows, Placement.STREAM)

    def _placed(self, place: Placement) -> list[int]:
        return [row for row, at in enumerate(self._states.placement) if at is place]

    def _grad_bytes(self, rows: Sequence[int]) -> int:
        return sum(self._parameters[row].numel() * self._parameters[row].element_size() for row in rows)
