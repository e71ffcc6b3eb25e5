"""A unit's part of a plan, piece by piece: a piece is a whole parameter or a range of one.

    whole parameters   where nothing else is known, and of optimizers whose update is not
                       elementwise
    a remainder        what a bound on resident states leaves is filled, to a chunk, with a part of
                       a parameter

    the first unit     its largest parameter may be cut between the CPU and streaming (cuts.py)

Other shares between CPU and streaming end between parameters: the CPU's part of a cut parameter
leaves only at `step()`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hytrain_fx.ir.plan import Placement, Plan, PlanRow
from hytrain_fx.ir.profile import UnitProfile
from hytrain_fx.ir.task_graph import Unit


def pieces_of(plan: Plan, unit: Unit | UnitProfile) -> list[PlanRow]:
    """One row for each parameter of the unit.

    It is cut where a share of the plan ends in a parameter that may be cut.

    Where parameters are whole, each has placement and reason of the share that holds its first
    element.
    """
    shares, ends = plan.shares(unit.index), set(accumulate(unit.param_numels or (unit.params,)))
    if unit.grain_params:
        ends.update(share.end for share in shares)
    pieces, at = [], 0
    for end in sorted(ends):
        holder = next(row for row in shares if row.begin <= at < row.end)
        pieces.append(replace(holder, begin=at, end=end))
        at = end
    return pieces


def params_kept(plan: Plan, unit: Unit | UnitProfile) -> int:
    """Elements whose gradients stay on the device until their update.

    Of a cut parameter the whole gradient does.
    """
    pieces, ends = pieces_of(plan, unit), list(accumulate(unit.param_numels or (unit.params,)))
    there = [piece for piece in pieces if not piece.placement.updates_on_cpu]
    return sum(end - begin for begin, end in zip([0, *ends], ends, strict=False)
               if any(piece.begin < end and begin < piece.end for piece in there))


def joined(pieces: Sequence[PlanRow]) -> list[PlanRow]:
    """Neighbours of one placement and one reason as one row."""
    rows: list[PlanRow] = []
    for piece in pieces:
        if rows and (rows[-1].placement, rows[-1].reason) == (piece.placement, piece.reason):
            rows[-1] = replace(rows[-1], end=piece.end)
        else:
            rows.append(piece)
    return rows


def with_more_on_device(plan: Plan, unit: Unit | UnitProfile, free_bytes: float, state_bytes: float, why: str) -> Plan:
    """The plan with parameters of `unit`, the first that is not wholly on the device, there too.

    These are the largest that fit `free_bytes`. Of the smallest that does not fit, as many chunks
    as fit go there, where it may be cut.

    `state_bytes` are the bytes of a parameter on the device, gradient included. The plan stays the
    same where nothing fits, and where all of it would. Nothing is predicted for another plan.
    """
    pieces, left_bytes = pieces_of(plan, unit), free_bytes
    ends = list(accumulate(unit.param_numels or (unit.params,)))
    rest = [Span(begin, end) for begin, end in zip([0, *ends], ends, strict=False) if _is_off_device(pieces, begin, end)]
    chosen: list[Span] = []
    for span in sorted(rest, key=lambda span: -span.numel):
        if span.numel * state_bytes <= left_bytes:
            left_bytes -= span.numel * state_bytes
            chosen.append(span)
    part = _part_that_fits(set(rest) - set(chosen), unit, left_bytes, state_bytes)
    for span in (*chosen, *part):
        pieces = _moved(pieces, span, why)
    if not (chosen or part) or all(piece.placement.rests_on_device for piece in pieces):
        return plan
    before, after = [row for row in plan.rows if row.unit < unit.index], [row for row in plan.rows if row.unit > unit.index]
    return replace(plan, rows=(*before, *joined(pieces), *after), predicted={})


@dataclass(frozen=True, slots=True)
class Span:
    """A flat range of a unit's elements."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin


def _is_off_device(pieces: Sequence[PlanRow], begin: int, end: int) -> bool:
    return all(not piece.placement.rests_on_device for piece in pieces if piece.begin < end and begin < piece.end)


def _part_that_fits(rest: Collection[Span], unit: Unit | UnitProfile, left_bytes: float, state_bytes: float) -> tuple[Span, ...]:
    """As many chunks of the smallest of these parameters as fit.

    () where none fits, or parameters are whole.

    The gradient of a cut parameter stays on the device as a whole.
    """
    if not (rest and unit.grain_params):
        return ()
    smallest = min(rest, key=lambda span: (span.numel, span.begin))
    gradient_bytes = unit.grad_bytes / unit.params
    numel = int((left_bytes - smallest.numel * gradient_bytes) / (state_bytes - gradient_bytes))
    numel -= numel % unit.grain_params
    return (Span(smallest.begin, smallest.begin + numel),) if 0 < numel < smallest.numel else ()


def _moved(pieces: Sequence[PlanRow], span: Span, why: str) -> list[PlanRow]:
    """The pieces with the span on the device; a piece that ends beyond the span is cut there."""
    moved: list[PlanRow] = []
    for piece in pieces:
        if piece.end <= span.begin or span.end <= piece.begin:
            moved.append(piece)
            continue
        moved.append(replace(piece, end=min(piece.end, span.end), placement=Placement.GPU, reason=why))
        if piece.end > span.end:
            moved.append(replace(piece, begin=span.end))
    return moved
