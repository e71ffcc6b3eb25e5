"""Which share of which unit is updated where, and why: the decision as data.

A plan has one row per contiguous flat range of a unit (a layer), keyed by `(rank, unit, begin,
end)`. Ranges of one unit tile it without gap or overlap. A plan is a value: JSON in, JSON out,
equal when equal.

The model that runs has the same as pieces: `(parameter, begin, end, rank)`, each with its
placement.
"""

from __future__ import annotations

import enum
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from hytrain_fx.errors import PlanError
from hytrain_fx.ir.named_files import json_object


class Placement(enum.StrEnum):
    """Where a share is updated, and so where its fp32 states rest."""

    GPU = "gpu"  # states rest on the device, updated there
    CPU = "cpu"  # states rest in host memory, updated by CPU workers
    STREAM = "stream"  # states rest in host memory and visit the device to be updated

    @property
    def rests_on_device(self) -> bool:
        """Whether the states rest there."""
        return self is Placement.GPU

    @property
    def updates_on_cpu(self) -> bool:
        """Whether gradients go to the host, to a slot, and new weights come from there."""
        return self is Placement.CPU

    @property
    def visits_device(self) -> bool:
        """Whether the states rest on the host and go to the device for their update."""
        return self is Placement.STREAM


CUT_ALIGN_PARAMS = 64
"""Parameters are cut at multiples of so many elements.

Memory of every dtype is aligned to cache lines then.
"""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """The grain of ownership, placement and update.

    It is the elements `begin..end` of one parameter, in the order of its memory.

    parameter   its number in the table of parameters
    rank        the process that updates it
    """

    parameter: int
    begin: int
    end: int
    rank: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, order=True)
class PlacedPiece:
    """A piece and where it is updated."""

    piece: Piece
    placement: Placement


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One share: parameters `begin..end` (flat, in elements) of unit number `unit`."""

    unit: int
    unit_name: str
    begin: int
    end: int
    placement: Placement
    reason: str
    rank: int = 0

    @property
    def numel(self) -> int:
        """Number of parameters in this share."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Plan:
    """Placement of every unit, the numbers it was decided from, and what is predicted for it.

    `k` is the number of leading units wholly updated on the device. `inputs` and `predicted` map a
    name with its unit in the name (`t_bwd_us`, `gpu_states_bytes`) to a figure; `source` says who
    decided ("seed", "cotrain", "windowed", "fixed k", "loaded", "first steps").
    """

    rows: tuple[PlanRow, ...]
    k: int
    source: str
    inputs: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """This plan as JSON text."""
        return json.dumps(asdict(self), indent=1)

    def shares(self, unit: int) -> tuple[PlanRow, ...]:
        """The rows of one unit, in order of their range."""
        return tuple(sorted((row for row in self.rows if row.unit == unit), key=lambda row: row.begin))

    def numel(self, placement: Placement) -> int:
        """Number of parameters placed there, over all units and ranks."""
        return sum(row.numel for row in self.rows if row.placement == placement)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read `to_json`'s text back. Raises PlanError where it is not such a text."""
        try:
            raw = json_object(text)
            rows = tuple(PlanRow(**{**row, "placement": Placement(row["placement"])}) for row in raw.pop("rows"))
            read = cls(rows=rows, notes=tuple(raw.pop("notes", ())), **raw)
            _require_kinds(read)
            return read
        except KeyError as error:
            raise PlanError(f"this is not a saved plan: found no {error}; expected the text that Plan.to_json() writes") from error
        except (TypeError, ValueError) as error:
            raise PlanError(f"this is not a saved plan: {error}; expected the text that Plan.to_json() writes") from error


def _require_kinds(plan: Plan) -> None:
    """Raise TypeError where a text holds something else instead of a number or a word."""
    for name, value in (("k", plan.k), *((name, getattr(row, name)) for row in plan.rows for name in ("unit", "begin", "end", "rank"))):
        if type(value) is not int or value < 0:
            raise TypeError(f"{name} is {value!r}")
    words = (("source", plan.source), *(("notes", note) for note in plan.notes),
             *((name, getattr(row, name)) for row in plan.rows for name in ("unit_name", "reason")))
    for name, value in words:
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r}")
    for name in ("inputs", "predicted"):
        figures = getattr(plan, name)
        if not isinstance(figures, dict):
            raise TypeError(f"{name} is {figures!r}")
        for key, value in figures.items():
            if not isinstance(value, int | float):
                raise TypeError(f"{name}[{key!r}] is {value!r}")


class PlannedUnit(Protocol):
    """What a plan must know of a unit.

    `ir.task_graph.Unit` and `ir.profile.UnitProfile` both have it.
    """

    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def params(self) -> int: ...


def renumbered(plan: Plan, units: Sequence[PlannedUnit]) -> Plan:
    """The same plan for units that count in another order, found by their names.

    The order is known once a forward has run, and a plan may have been saved then. As it is where
    its names are not theirs, which `validate` tells of.
    """
    number = {unit.name: unit.index for unit in units}
    if {row.unit_name for row in plan.rows} != set(number) or all(number[row.unit_name] == row.unit for row in plan.rows):
        return plan
    rows = sorted((replace(row, unit=number[row.unit_name]) for row in plan.rows), key=lambda row: (row.unit, row.begin))
    ordered = replace(plan, rows=tuple(rows))
    return replace(ordered, k=leading_device_units(ordered, units))


def validate(plan: Plan, units: Sequence[PlannedUnit]) -> None:
    """Check that the plan's rows tile every unit, and only these units.

    Raises PlanError naming the first misfit.

    `k` must be the number of leading units that are wholly on the device.
    """
    rows: dict[int, list[PlanRow]] = defaultdict(list)
    for row in plan.rows:
        rows[row.unit].append(row)
    strangers = sorted(set(rows) - {unit.index for unit in units})
    if strangers:
        raise PlanError(f"the plan places unit {strangers[0]}, the model has units 0..{len(units) - 1}; solve a plan for this model")
    for unit in units:
        _validate_tiling(unit, sorted(rows[unit.index], key=lambda row: row.begin))
    leading = leading_device_units(plan, units)
    if plan.k != leading:
        raise PlanError(f"the plan says k={plan.k}, but its rows place the first {leading} units wholly on the device")


def pieces_of_unit(
    plan: Plan, unit: int, parameters: Sequence[tuple[int, int]], is_whole: Callable[[int], bool]
) -> list[PlacedPiece]:
    """The pieces that a plan makes of one unit's parameters, as few as there can be.

    parameters   the number and the elements of each, in the unit's order
    is_whole     of a parameter's number: whether it may not be cut; it goes where the share of its
                 first element goes

    A share that ends inside a parameter is cut at the multiple of `CUT_ALIGN_PARAMS` before it.
    """
    placed: list[PlacedPiece] = []
    shares, at = plan.shares(unit), 0
    for parameter, numel in parameters:
        ends = [] if is_whole(parameter) else [share.end - at for share in shares if at < share.end < at + numel]
        cuts = sorted({0, numel, *(end - end % CUT_ALIGN_PARAMS for end in ends)})
        for begin, end in pairwise(cuts):
            # a cut was moved down, into the share before it
            tells = at if end - begin == numel else at + end - 1
            of = next(share for share in shares if share.begin <= tells < share.end)
            last = placed[-1] if begin else None
            if last is not None and (last.placement, last.piece.rank) == (of.placement, of.rank):
                placed[-1] = PlacedPiece(replace(last.piece, end=end), of.placement)
            else:
                placed.append(PlacedPiece(Piece(parameter, begin, end, of.rank), of.placement))
        at += numel
    return placed


def leading_device_units(plan: Plan, units: Sequence[PlannedUnit]) -> int:
    """Number of leading units whose rows are all on the device."""
    elsewhere = {row.unit for row in plan.rows if row.placement != Placement.GPU}
    return next((i for i, unit in enumerate(units) if unit.index in elsewhere), len(units))


def _validate_tiling(unit: PlannedUnit, rows: list[PlanRow]) -> None:
    at = 0
    for row in rows:
        if row.unit_name != unit.name:
            raise PlanError(f"unit {unit.index} is {unit.name!r}, the plan calls it {row.unit_name!r}; it was made for another model")
        if row.begin != at or row.end <= row.begin:
            raise PlanError(f"unit {unit.index} ({unit.name}): found the range {row.begin}..{row.end}, expected one that starts at {at}")
        at = row.end
    if at != unit.params:
        raise PlanError(f"unit {unit.index} ({unit.name}): its rows end at {at}, expected {unit.params} parameters")


def whole_on_cpu(placed: Sequence[PlacedPiece]) -> set[int]:
    """The parameters of which the CPU updates all, in one piece."""
    pieces = Counter(of.piece.parameter for of in placed)
    return {of.piece.parameter for of in placed if of.placement is Placement.CPU and pieces[of.piece.parameter] == 1}
