"""Watches when the updates of running steps end, and finds the share to stream that levels them.

A level share lets CPU and streamed updates end together.
`cost_model/balance.py` says how such a share follows from the ends, `planning/controller.py` when
it is looked for.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hytrain_fx.cost_model.balance import (
    SURE,
    TOLERANCE,
    Ends,
    balanced_share,
    ends_reason,
    lane_load,
    median_of,
    streamed_share,
    weights_ratio,
    with_share,
)
from hytrain_fx.cost_model.replan import standard_error
from hytrain_fx.ir.plan import Plan, PlanRow
from hytrain_fx.ir.task_graph import Unit
from hytrain_fx.runtime.engine import FinishTimes

# Steps after a move: the one that moved, the one with its first updates, and one more, as each is
# told a step later.
_SETTLING_STEPS = 3
_MOST_SEEN_STEPS = 8  # steps under the plan in force: more steps make it more certain
_NOTE = "the streamed share was balanced"  # begins the note about it
_WIDEST = 4 * TOLERANCE
# Share of the wanted change. Whole parameters may give less, such as another choice of them with
# the same sum.
_LEAST_MOVED = 0.5
# Share of the time to the last update. With longer pauses the backward, and not the CPU's rate,
# decides when its updates end.
_PAUSES = 0.1
# Share of what less on the lane should bring. After so many moves that brought less, gradients are
# taken to decide when it ends.
_LEAST_BROUGHT = 0.5
_MOST_VAIN = 2


@dataclass(frozen=True, slots=True)
class _Less:
    """A plan that puts less on a lane that ended last.

    most_us    for how long the lane may have states under it, if that is to have helped
    noise_us   standard error of what that was calculated from
    """

    rows: tuple[PlanRow, ...]
    most_us: float
    noise_us: float


class Balancing:
    """The ends of the last steps under one plan.

    A share that must go back where it came from was moved by noise, and each move holds a step up.
    Then the tolerance doubles, until a plan with another k comes. A CPU that ends last although it
    has paused for gradients gains nothing: less work would not end sooner.

        fresh        steps that have reported since a share was last looked for
        lane_is_late whether the lane to the device ends last by its rate, in the steps looked at.
                     Then less on it pays, whatever is predicted: a profile of single copies may
                     promise more of the lane than it gives beside updates by the CPU. Not where
                     less on it has not helped: then streamed states wait for gradients
        runs_ahead   whether the launching thread does, as far as was seen; it does not where the
                     loop waits for the device between forward and backward
    """

    def __init__(self) -> None:
        self._ends: deque[FinishTimes] = deque(maxlen=_MOST_SEEN_STEPS)
        self.fresh = 0
        self.lane_is_late = False
        self._less: _Less | None = None  # whose steps have not been looked at
        self._vain = 0  # such plans, one after the other, that have not helped
        self._settling = _SETTLING_STEPS
        self._k: int | None = None
        self._tolerance = TOLERANCE
        self._last_change = 0.0  # of the share
        self.runs_ahead = True

    def restart(self, plan: Plan) -> None:
        """Another plan is in force."""
        self._ends.clear()
        self.fresh = 0
        self._settling = _SETTLING_STEPS
        if plan.k != self._k:
            self._k, self._tolerance, self._last_change, self.runs_ahead = plan.k, TOLERANCE, 0.0, True
            self._vain = 0

    def saw(self, ends: FinishTimes) -> None:
        """A step has ended. Steps without both kinds of update tell nothing."""
        if self._settling:
            self._settling -= 1
        elif ends.cpu_us and ends.streamed_us:
            self._ends.append(ends)
            self.fresh += 1

    def better(self, plan: Plan, units: tuple[Unit, ...], step_us: float, steps_done: int) -> Plan | None:
        """A plan with another share.

        None where updates end together already, or where no share would change that.
        """
        self.fresh = 0
        seen = [Ends(ends.cpu_us, ends.streamed_us, ends.streamed_held_us, ends.cpu_begun_us) for ends in self._ends]
        pauses = statistics.median(ends.cpu_paused_us / ends.cpu_us for ends in self._ends)
        self.runs_ahead = any(ends.ahead > 0 for ends in self._ends)
        self._look_at_lane(plan, seen)
        share, ratio = streamed_share(plan), weights_ratio(units)
        wanted = balanced_share(share, seen, step_us, ratio, self._tolerance)
        if wanted is not None and (wanted - share) * self._last_change < 0:
            self._tolerance = min(2 * self._tolerance, _WIDEST)
            wanted = balanced_share(share, seen, step_us, ratio, self._tolerance)
        if wanted is None or (wanted > share and pauses > _PAUSES):
            return None
        if self.lane_is_late:
            wanted = max(wanted, share / 2)  # with none left its steps would not tell whether that has helped
        why = ends_reason(seen, steps_done)
        new = with_share(plan, units, wanted, why)
        if (streamed_share(new) - share) / (wanted - share) < _LEAST_MOVED:
            return None
        self._last_change = wanted - share
        if self.lane_is_late:
            left = lane_load(streamed_share(new), ratio) / lane_load(share, ratio)
            lane_us, noise_us = _lane_us(seen)
            self._less = _Less(new.rows, lane_us * (1 - _LEAST_BROUGHT * (1 - left)), noise_us)
        notes = [note for note in plan.notes if not note.startswith(_NOTE)]
        return replace(new, notes=(*notes, f"{_NOTE} from {share:.0%} to {streamed_share(new):.0%}: {why}"))

    def _look_at_lane(self, plan: Plan, seen: Sequence[Ends]) -> None:
        """Whether it ends last; in the first look after a move to less, whether that has helped."""
        less, self._less = self._less, None
        if less is not None and less.rows == plan.rows:
            lane_us, noise_us = _lane_us(seen)
            self._vain = self._vain + 1 if lane_us - less.most_us > SURE * math.hypot(noise_us, less.noise_us) else 0
        self.lane_is_late = median_of(seen).late_us < 0 and self._vain < _MOST_VAIN


def _lane_us(seen: Sequence[Ends]) -> tuple[float, float]:
    """For how long the lane had states, and the standard error of that."""
    return median_of(seen).lane_worked_us, standard_error([step.lane_worked_us for step in seen])
