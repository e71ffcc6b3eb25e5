"""A unit's part of a plan, parameter by parameter: what is moved between placements are whole parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hytrain_fx.ir.plan import Placement, Plan, PlanRow
from hytrain_fx.ir.profile import UnitProfile
from hytrain_fx.ir.task_graph import Unit


def pieces_of(plan: Plan, unit: Unit | UnitProfile) -> list[PlanRow]:
    """One row for each parameter of the unit, with the placement and reason of the share that holds its first element."""
    shares, pieces, at = plan.shares(unit.index), [], 0
    for numel in unit.param_numels or (unit.params,):
        holder = next(row for row in shares if row.begin <= at < row.end)
        pieces.append(replace(holder, begin=at, end=at + numel))
        at += numel
    return pieces


def joined(pieces: Sequence[PlanRow]) -> list[PlanRow]:
    """Neighbours of one placement and one reason as one row."""
    rows: list[PlanRow] = []
    for piece in pieces:
        if rows and (rows[-1].placement, rows[-1].reason) == (piece.placement, piece.reason):
            rows[-1] = replace(rows[-1], end=piece.end)
        else:
            rows.append(piece)
    return rows


def with_more_on_device(plan: Plan, unit: Unit | UnitProfile, free_params: float, why: str) -> Plan:
    """The plan with parameters of `unit`, the first that is not wholly on the device, there too: the largest that fit `free_params`.

    The same plan where none fits, and where all of them would. Nothing is predicted for another.
    """
    pieces, left = pieces_of(plan, unit), free_params
    for i in sorted(range(len(pieces)), key=lambda i: -pieces[i].numel):
        if pieces[i].placement is not Placement.GPU and pieces[i].numel <= left:
            left -= pieces[i].numel
            pieces[i] = replace(pieces[i], placement=Placement.GPU, reason=why)
    if left == free_params or all(piece.placement is Placement.GPU for piece in pieces):
        return plan
    before, after = [row for row in plan.rows if row.unit < unit.index], [row for row in plan.rows if row.unit > unit.index]
    return replace(plan, rows=(*before, *joined(pieces), *after), predicted={})
