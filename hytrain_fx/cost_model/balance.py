"""CPU and streamed updates that end together: the streamed share, moved by what running steps show.

Where both kinds of update work without a pause from their first one on, a step is shortest where
neither ends before the other. No profile of single stages tells how fast each is next to the other,
since they share host memory and the link. But every step shows when each ended:

    y' = y + (t_cpu - t_streamed) / (w_cpu / (1 - y) + (1 - r) w_streamed / (y + (1 - y) r))

is where both would end together at the rates that they had: t is when each ended, w the time for
which it worked. y is the streamed share of the parameters that rest on the host.

Streamed states travel to the device on one lane with the new weights of what the CPU updates. These
have r times as many bytes, so more streaming sends fewer weights. Streamed states may stand there
after new weights that the CPU has not updated. Then they end with the CPU, whatever the share, and
without that wait they would have ended earlier by as long as they stood.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

from hytrain_fx.cost_model.pieces import joined, pieces_of
from hytrain_fx.cost_model.replan import standard_error
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.limits import SMALL_PARAMETER_SHARE
from hytrain_fx.ir.plan import Placement, Plan, PlanRow
from hytrain_fx.ir.task_graph import Unit

TOLERANCE = 0.03
"""Of a step: ends that lie so near are left alone."""
SURE = 2.0
"""Standard errors: what differs by less may be noise."""
_DAMPING = 0.7  # share of the way: rates change with the share


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of one step, in microseconds from its commit.

        cpu_us       when the last update by the CPU ended
        streamed_us  when the last streamed states were on the device
        held_us      of that, how long they stood after new weights that the CPU had not updated
        begun_us     when the first update by the CPU began
    """

    cpu_us: float
    streamed_us: float
    held_us: float = 0.0
    begun_us: float = 0.0

    @property
    def late_us(self) -> float:
        """By how much the CPU ends after streamed updates that nothing holds up."""
        return self.cpu_us - self.streamed_us + self.held_us

    @property
    def cpu_worked_us(self) -> float:
        """For how long the CPU had updates."""
        return self._worked_us(self.cpu_us)

    @property
    def lane_worked_us(self) -> float:
        """For how long the lane to the device had streamed states, without what held it up."""
        return self._worked_us(self.streamed_us - self.held_us)

    def _worked_us(self, end_us: float) -> float:
        """The time from the first update on, at least a quarter of all.

        Which kind begins first is not known, and a move too far costs two.
        """
        return max(end_us - self.begun_us, end_us / 4)


def streamed_share(plan: Plan) -> float:
    """The streamed share of the parameters whose states rest on the host; 0 without any."""
    streamed, by_cpu = plan.numel(Placement.STREAM), plan.numel(Placement.CPU)
    return streamed / (streamed + by_cpu) if streamed else 0.0


def weights_ratio(units: Sequence[Unit]) -> float:
    """r: bytes of new weights over bytes of streamed states, on the lane to the device.

    Both are of as many parameters.
    """
    states = sum(unit.stream_bytes for unit in units)
    return sum(unit.grad_bytes for unit in units) / states  # a weight has its gradient's dtype


def balanced_share(share: float, ends: Sequence[Ends], step_us: float, ratio: float, tolerance: float = TOLERANCE) -> float | None:
    """The share under which both kinds of update end together; None where they do already.

        share      the share 0 < y < 1 of the steps that were seen
        ends       of each step
        step_us    length of a step
        ratio      0 <= r < 1, of `weights_ratio`
        tolerance  share of a step by which the ends may differ; they may also differ by what the
                   scatter of the steps explains
    """
    seen = median_of(ends)
    noise_us = standard_error([step.late_us for step in ends])
    if abs(seen.late_us) <= max(tolerance * step_us, SURE * noise_us):
        return None
    by_cpu, by_lane = seen.cpu_worked_us / (1 - share), (1 - ratio) * seen.lane_worked_us / lane_load(share, ratio)
    change = seen.late_us / (by_cpu + by_lane)
    return min(max(share + _DAMPING * change, 0.0), 1.0)


def lane_load(share: float, ratio: float) -> float:
    """What the lane to the device carries, in states of all that rests on the host."""
    return share + (1 - share) * ratio


def with_share(plan: Plan, units: Sequence[Unit], share: float, why: str) -> Plan:
    """The plan with few pieces moved between CPU and STREAM.

    Afterwards about `share` of every prefix of units is streamed. A parameter that is cut between
    the two keeps its cut, for the units after it to make up for, unless all is to be the same.

    units   with the sizes of their parameters, in forward order
    why     the reason of the rows that are moved
    """
    rows: list[PlanRow] = []
    missing = 0.0  # parameters of the units so far that should be streamed and are not
    for unit in units:
        pieces = pieces_of(plan, unit)
        stays = _cut_in_two(pieces, unit)
        if not 0 < share < 1:
            place, cut, stays = Placement.STREAM if share else Placement.CPU, stays, frozenset()
            pieces = [replace(piece, placement=place, reason=why) if i in cut else piece for i, piece in enumerate(pieces)]
        hosted = [i for i, piece in enumerate(pieces) if not piece.placement.rests_on_device]
        missing += share * sum(pieces[i].numel for i in hosted) - sum(p.numel for p in pieces if p.placement.visits_device)
        while (i := _nearest(pieces, missing, stays)) is not None:
            streams = missing > 0
            missing -= pieces[i].numel if streams else -pieces[i].numel
            pieces[i] = replace(pieces[i], placement=Placement.STREAM if streams else Placement.CPU, reason=why)
        rows += joined(pieces)
    return replace(plan, rows=tuple(rows), inputs={**plan.inputs, "stream_share": share}, predicted={})


def ends_reason(ends: Sequence[Ends], steps_done: int) -> str:
    """What was seen, for rows that move."""
    seen = median_of(ends)
    held = f", {time_text(seen.held_us)} of them after the CPU's" if seen.held_us else ""
    streamed = time_text(seen.streamed_us) + held
    return f"after {steps_done} steps CPU updates ended {time_text(seen.cpu_us)} after the commit, streamed ones {streamed}"


def median_of(ends: Sequence[Ends]) -> Ends:
    """Of each figure alone."""
    return Ends(*(statistics.median(getattr(step, field.name) for step in ends) for field in fields(Ends)))


def _cut_in_two(pieces: Sequence[PlanRow], unit: Unit) -> frozenset[int]:
    """The positions of pieces of parameters that are partly updated by the CPU, partly streamed."""
    found: set[int] = set()
    for end, numel in zip(accumulate(unit.param_numels), unit.param_numels, strict=True):
        of = [i for i, piece in enumerate(pieces) if end - numel <= piece.begin < end]
        if {Placement.CPU, Placement.STREAM} <= {pieces[i].placement for i in of}:
            found.update(i for i in of if not pieces[i].placement.rests_on_device)
    return frozenset(found)


def _nearest(pieces: Sequence[PlanRow], missing: float, stays: Collection[int]) -> int | None:
    """The parameter whose move brings the streamed part nearest to what is wanted.

    None where no move brings it nearer.
    """
    source = Placement.CPU if missing > 0 else Placement.STREAM
    least = SMALL_PARAMETER_SHARE * max(piece.numel for piece in pieces)
    large = [i for i, piece in enumerate(pieces) if i not in stays and piece.placement is source and piece.numel >= least]
    best = min(large, key=lambda i: abs(abs(missing) - pieces[i].numel), default=None)
    return best if best is not None and abs(abs(missing) - pieces[best].numel) < abs(missing) else None
