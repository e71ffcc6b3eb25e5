"""The units of one model as the planner sees them.

They are in forward order, with sizes, floating-point operations and rows of the table.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from hytrain_fx.capture.backend import Capture
from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.capture.units import Unit as RegisteredUnit
from hytrain_fx.cost_model.budget import UnitBytes
from hytrain_fx.ir.limits import CHUNK_PARAMS, FP32_BYTES, UNITS_AHEAD
from hytrain_fx.ir.plan import Piece, PlacedPiece, Placement, Plan, pieces_of_unit, validate
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import Unit
from hytrain_fx.planning.weight_window import WeightWindow, with_collectives, with_fetches
from hytrain_fx.runtime.lane_times import LaneTimes
from hytrain_fx.runtime.probe import full_duplex_us_per_byte
from hytrain_fx.runtime.ranks import Ranks
from hytrain_fx.runtime.states.copied_weights import owns_memory
from hytrain_fx.runtime.states.store import StateStore


class ModelUnits:
    """A call gives the units as known so far.

    capture    the model's graphs, from when they can be captured on: the forward's order and the
               operations come from them
    window     of weights that may rest on the host or in shards, where they do
    """

    capture: Capture[Any] | None = None
    window: WeightWindow | None = None

    def __init__(self, table: ParameterTable, registered: Sequence[RegisteredUnit], states: StateStore, ranks: Ranks | None) -> None:
        self._table = table
        self._registered = registered
        self._states = states
        self._ranks = ranks

    def __call__(self) -> tuple[Unit, ...]:
        """Forward order once a forward graph is captured, order of registration before."""
        order = tuple(unit.number for unit in self._registered) if self.capture is None else self.capture.unit_order
        return tuple(self._unit(index, number) for index, number in enumerate(order))

    def fixed(self) -> tuple[Unit, ...]:
        """The same, in this order from now on: profiles and plans count in it.

        Units that no forward has used by now stay last.
        """
        if self.capture is not None:
            for number in self.capture.unit_order:
                self.capture.next_in_order(number)
        return self()

    def rows_of(self, unit: Unit) -> tuple[int, ...]:
        """Rows of its parameters, in the unit's order."""
        names = self._table.names
        return tuple(names.index(name) for name in unit.param_names)

    def of_rows(self) -> dict[int, int]:
        """The index of the unit of each row of the engine that is in use."""
        found = self._of_parameters()
        return {row: found[self._states.pieces.parameter(row)] for row in self._states.placement}

    def _of_parameters(self) -> dict[int, int]:
        return {parameter: unit.index for unit in self() for parameter in self.rows_of(unit)}

    # ---- weights that rest on the host or in shards, and what ranks exchange ----

    @property
    def ahead(self) -> int:
        """Units whose weights are brought ahead of need."""
        return UNITS_AHEAD if self.window is None else self.window.ahead

    @property
    def _lane(self) -> LaneTimes | None:
        return self._ranks.times if self._ranks is not None else None if self.window is None else self.window.times

    def time_lanes(self, on: bool) -> None:
        """Keep when units are brought, and go from rank to rank, from now on, or not."""
        if self._lane is not None:
            self._lane.record(on)

    def with_lane_times(self, profile: Profile) -> Profile:
        """The profile of the steps just measured, with the times of fetches and collectives."""
        if self._lane is None:
            return profile
        timed, unit_of = self._lane.take_reached(), self._of_parameters()
        if self.window is not None:
            profile = with_fetches(profile, timed, unit_of, self._link_us_per_byte)
        # On a CPU a collective blocks the thread that computes, whose times have it already.
        if self._ranks is not None and self._table.device.type == "cuda":
            nbytes = [0] * len(profile.units)
            for row, unit in unit_of.items():
                nbytes[unit] += self._table.parameters[row].numel() * self._table.parameters[row].element_size()
            profile = with_collectives(profile, timed, unit_of, nbytes)
        return profile

    def _link_us_per_byte(self) -> float:
        return full_duplex_us_per_byte(self._table.device)[0]

    # ---- their places ----

    def pieces_of(self, plan: Plan) -> tuple[PlacedPiece, ...]:
        """The pieces that the plan makes of all parameters, in the parameters' order.

        Raises PlanError where the plan is not of these units.
        """
        units = self()
        validate(plan, units)
        of_units = (pieces_of_unit(plan, unit.index, list(zip(self.rows_of(unit), unit.param_numels, strict=True)), self._states.is_whole)
                    for unit in units)
        return tuple(sorted(map(self._here, itertools.chain.from_iterable(of_units))))

    def _here(self, placed: PlacedPiece) -> PlacedPiece:
        """With what parameters that have owners ask for.

        One that another rank updates has no elements here, and waits for no copy. What every rank
        updates rests on the device: the ranks' plans differ, and a step without a kernel may have
        other bits on the host.
        """
        table, parameter = self._table, placed.piece.parameter
        if table.is_elsewhere(parameter):
            return PlacedPiece(Piece(parameter, 0, 0), Placement.GPU)
        return PlacedPiece(placed.piece, Placement.GPU) if table.has_owners and parameter not in table.shards else placed

    def _unit(self, index: int, number: int) -> Unit:
        unit = self._registered[number]
        # Planning knows no empty units: what another rank updates counts as one element.
        numels = tuple(max(self._table.homes[row].numel(), 1) for row in unit.rows)
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
            grain_params=0 if any(map(self._states.is_whole, unit.rows)) else CHUNK_PARAMS,
            grad_bytes=max(sum(map(self._states.travelling_bytes, unit.rows)), 1),
            traffic=self._states.traffic(unit.rows),
            fetched_params=0 if self.window is None else self.window.streamed_params(unit.rows),
            gathered_params=0 if self.window is None else self.window.gathered_params(unit.rows),
            forward_flops=flops["forward"],
            backward_flops=flops["backward"],
        )


# ---- Memory of states and gradients, on each side and per parameter ----
#
# The planner's arithmetic, for the model that runs.


class StateSizes:
    """Of all rows of one model, wherever their states rest.

    may_copy   autocast may give fp32 weights copies, which then take what `as_copied` counts
    """

    def __init__(self, table: ParameterTable, states: StateStore, *, may_copy: bool = False) -> None:
        self._homes = table.homes
        self._states = states
        self._rows = range(len(table))
        self.may_copy = may_copy and any(map(owns_memory, table.homes))

    @property
    def may_be_streamed(self) -> bool:
        """Whether all that has to be pinned on the host is: copies are asynchronous then."""
        return not any(slab.unpinned for slab in self._states.slabs)

    def of(self, rows: Sequence[int], *, as_copied: bool = False) -> UnitBytes:
        """What a unit of these rows takes of either memory, as it is or with copies."""
        states, gradients = self._states, self._grad_bytes(rows)
        new = [self._homes[row] for row in rows if as_copied and row not in states.copies and owns_memory(self._homes[row])]
        device = states.device_bytes(rows) + gradients + sum(home.nbytes for home in new)  # the weight is a master beside its copy
        host = states.host_bytes(rows, Placement.STREAM)
        return UnitBytes(device, gradients, host, states.host_bytes(rows) - host)

    def host_bytes_of(self, placed: Sequence[PlacedPiece]) -> int:
        """Host memory that states take there, with their slots."""
        return self._states.host_bytes_of(placed)

    def staged_bytes_per_param(self) -> int:
        """What a staging slot has room for: the most states that one of the rows has, in fp32."""
        return FP32_BYTES * max((self._states.table(row).tensors for row in self._rows), default=1)

    def resident_device_bytes(self) -> int:
        """Device memory that states, and gradients waiting there for their update, take already."""
        states = self._states
        on_device = [row for row, place in states.placement.items() if place.rests_on_device]
        stay = [row for row in self._rows if not states.gradient_leaves(row)]
        return states.device_bytes(on_device) + self._grad_bytes(stay)

    def resident_host_bytes(self) -> int:
        """Host memory that states, with their slots, take already."""
        return sum(self._states.host_bytes([row], place) for row, place in self._states.placement.items() if not place.rests_on_device)

    def moved_bytes(self, before: Sequence[PlacedPiece], after: Sequence[PlacedPiece]) -> int:
        """Bytes of states that change sides, or are copied for another cut of their parameter.

        Between CPU and STREAM those of the same pieces stay where they are.
        """
        was, now = _by_parameter(before), _by_parameter(after)
        params: Counter[int] = Counter()
        for parameter, pieces in now.items():
            cut_otherwise = [of.piece for of in pieces] != [of.piece for of in was[parameter]]
            params[parameter] = sum(_overlap(of.piece, old.piece) for of in pieces for old in was[parameter]
                                    if cut_otherwise or of.placement.rests_on_device != old.placement.rests_on_device)
        return sum(self._states.form_of(Piece(parameter, 0, count)).slab_bytes for parameter, count in params.items() if count)

    def _grad_bytes(self, rows: Sequence[int]) -> int:
        return sum(self._homes[row].numel() * self._homes[row].element_size() for row in rows)


def _overlap(a: Piece, b: Piece) -> int:
    return max(min(a.end, b.end) - max(a.begin, b.begin), 0)


def _by_parameter(placed: Sequence[PlacedPiece]) -> dict[int, list[PlacedPiece]]:
    found: dict[int, list[PlacedPiece]] = defaultdict(list)
    for of in sorted(placed):
        found[of.piece.parameter].append(of)
    return found
