"""Watches when the updates of running steps end, and finds the share to stream that levels them.

A level share lets CPU and streamed updates end together.
`cost_model/balance.py` says how such a share follows from the ends, `planning/controller.py` when
it is looked for.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, replace

from hytrain_fx.cost_model.balance import (
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
# Share of what less on the lane should bring. With less than that gradients decide when it ends.
_LEAST_BROUGHT = 0.5


@dataclass(frozen=True, slots=True)
class _Less:
    """A plan that puts less on a lane that ended last.

    `most_us`: for how long the lane may have states under it, if that is to have helped.
    """

    rows: tuple[PlanRow, ...]
    most_us: float


class Balancing:
    """The ends of the last steps under one plan.

    A share that must go back where it came from was moved by noise, and each move holds a step up.
    Then the tolerance doubles, until a plan with another k comes. A CPU that ends last although it
    has paused for gradients gains nothing: less work would not end sooner.

        fresh        steps that have reported since a share was last looked for
        lane_is_late whether the lane to the device ends last by its rate, in the steps of the last
                     share found. Then less on it pays, whatever is predicted: a profile of single
                     copies may promise more of the lane than it gives beside updates by the CPU.
                     Not where less on it has not helped: then streamed states wait for gradients
        runs_ahead   whether the launching thread does, as far as was seen; it does not where the
                     loop waits for the device between forward and backward
    """

    def __init__(self) -> None:
        self._ends: deque[FinishTimes] = deque(maxlen=_MOST_SEEN_STEPS)
        self.fresh = 0
        self.lane_is_late = False
        self._less: _Less | None = None  # whose steps have not been looked at
        self._waits = False  # the lane, for gradients
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
            self._waits = False

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
        middle = median_of(seen)
        self._look_at_lane(plan, middle.lane_worked_us)
        share, ratio = streamed_share(plan), weights_ratio(units)
        wanted = balanced_share(share, seen, step_us, ratio, self._tolerance)
        if wanted is not None and (wanted - share) * self._last_change < 0:
            self._tolerance = min(2 * self._tolerance, _WIDEST)
            wanted = balanced_share(share, seen, step_us, ratio, self._tolerance)
        if wanted is None or (wanted > share and pauses > _PAUSES):
            return None
        why = ends_reason(seen, steps_done)
        new = with_share(plan, units, wanted, why)
        if (streamed_share(new) - share) / (wanted - share) < _LEAST_MOVED:
            return None
        self._last_change = wanted - share
        self.lane_is_late = middle.late_us < 0 and not self._waits
        if self.lane_is_late:
            left = lane_load(streamed_share(new), ratio) / lane_load(share, ratio)
            self._less = _Less(new.rows, middle.lane_worked_us * (1 - _LEAST_BROUGHT * (1 - left)))
        notes = [note for note in plan.notes if not note.startswith(_NOTE)]
        return replace(new, notes=(*notes, f"{_NOTE} from {share:.0%} to {streamed_share(new):.0%}: {why}"))

    def _look_at_lane(self, plan: Plan, worked_us: float) -> None:
        """The first look after a move to less: has the lane ended earlier for it?"""
        less, self._less = self._less, None
        if less is not None and less.rows == plan.rows and worked_us > less.most_us:
            self._waits = True
