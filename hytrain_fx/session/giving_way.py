"""What of a session is on the device and can take less of its memory.

States and slots of weights are here, weights themselves in late_streaming.py.
"""

from __future__ import annotations

from typing import Final, Protocol

from hytrain_fx.errors import PlanError
from hytrain_fx.ir.figures import bytes_text
from hytrain_fx.planning.controller import Event, State
from hytrain_fx.planning.planning import Planning
from hytrain_fx.runtime.ranks import Ranks
from hytrain_fx.session.resources import Resources
from hytrain_fx.weights.fetched_units import FetchedUnits

LEAST_BYTES: Final = 64 << 20
"""States on the device that take less than this go as a whole."""


class GivesWay(Protocol):
    """One kind of memory on the device."""

    @property
    def may(self) -> bool:
        """Whether it would take less if it were asked to."""
        ...

    def give(self, why: str) -> bool:
        """Whether it takes less, from now on or once the next forward has begun."""
        ...


class StatesGiveWay:
    """Half of the states on the device go to the host, by a plan of the next forward.

    since_step   when they last did, None where they may be back
    """

    def __init__(self, planning: Planning, resources: Resources) -> None:
        self.since_step: int | None = None
        self._before: int | None = None  # the plan of then: its number in the history, where all are renumbered
        self._planning = planning
        self._resources = resources

    @property
    def nbytes(self) -> int:
        """What is on the device."""
        return self._resources.tiers().device_bytes

    @property
    def is_fixed(self) -> bool:
        """Whether the options have them where they are."""
        return not self._planning.solver.may_give_way

    @property
    def may(self) -> bool:
        """As of `GivesWay`. Before a plan was solved nothing is known of others."""
        return self.nbytes > 0 and not self.is_fixed and self._planning.profile is not None

    def give(self, why: str) -> bool:
        """As of `GivesWay`."""
        planning, nbytes = self._planning, self.nbytes
        if not self.may or planning.profile is None:
            return False
        most_bytes = planning.solver.most_bytes
        if most_bytes is not None and nbytes > most_bytes:
            return planning.is_due  # else the last move did not come about
        limit_bytes = planning.solver.most_bytes = nbytes // 2 if nbytes > LEAST_BYTES else 0
        why = f"{why}: {bytes_text(nbytes - limit_bytes)} of states or more go to the host"
        try:
            fewer = planning.solver.solved(planning.profile, planning.guard, planning.discipline)
        except PlanError:
            planning.solver.most_bytes = most_bytes
            return False  # the host has no room
        planning.do(planning.controller.hear(Event.LOST, why))  # what is being measured is of the plan before
        planning.do(planning.controller.hear(Event.SHORT, why))  # and what is being tried would bring more to the device again
        self._before = len(planning.history) - 1 if self._before is None else self._before
        planning.want(fewer, why)
        self.since_step = planning.last.steps_done
        return True

    def may_return(self, why: str) -> bool:
        """Memory may be free again. Whether another plan is on its way for that.

        Another plan is solved. Where none is to follow, the plan of then comes back, if there is
        room for it; else it waits as long again. While another plan is tried, it waits for the end,
        and until the plan that gives way is in force.
        """
        planning = self._planning
        if planning.controller.state is State.TRYING or planning.is_due or planning.recording:
            return False
        if planning.controller.state is State.FIXED:
            return self._plan_returns(why)
        planning.solver.most_bytes = None
        planning.do(planning.controller.hear(Event.ROOM, why))
        self.since_step = self._before = None
        return True

    def _plan_returns(self, why: str) -> bool:
        planning = self._planning
        before = planning.history[0 if self._before is None else self._before]
        if planning.plan.rows == before.rows:  # it is in force since the last time, or no state could be moved
            self.since_step = self._before = planning.solver.most_bytes = None
            return False
        self.since_step, most_bytes = planning.last.steps_done, planning.solver.most_bytes
        planning.solver.most_bytes = None
        if not planning.solver.has_room(before, planning.plan, planning.discipline):
            planning.solver.most_bytes = most_bytes
            return False
        planning.want(before, f"{why}: the plan from before comes back")
        return True


class SlotsGiveWay:
    """Weights that rest on the host come one unit less ahead, in fewer slots."""

    def __init__(self, units: FetchedUnits, ranks: Ranks | None) -> None:
        self._units = units
        self._ranks = ranks

    @property
    def nbytes(self) -> int:
        """What is on the device."""
        return self._units.slot_bytes

    @property
    def may(self) -> bool:
        """As of `GivesWay`. Ranks gather weights alike, so none of them changes alone."""
        return self._units.has_units and self._units.ahead > 0 and not self._ranks

    def give(self, why: str) -> bool:
        """As of `GivesWay`."""
        if not self.may:
            return False
        self._units.look_ahead(self._units.ahead - 1)
        return True
