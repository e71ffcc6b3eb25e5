"""All states on the host streamed: tried once, where that may be faster than a level share.

A share under which both kinds of update end together is the best one near it. But both use the
host's memory, and beside updates by the CPU the copies of streamed states are slow. An update by
the CPU moves 30 bytes of it a parameter, a streamed one 20. So where the link is fast enough for
all states (each of several ranks has one), steps without updates by the CPU may be the shortest,
and no level share leads there. Times of copies that nothing slows are in the profile of the first
steps, in which nothing was streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from hytrain_fx.cost_model.balance import streamed_share, with_share
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.plan import Plan, PlanRow
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import Unit

_SEEN: Final = 8  # steps whose median is compared
_GAIN: Final = 0.05  # share of a step that it must be predicted to bring


@dataclass(frozen=True, slots=True)
class _Predicted:
    """Figures of all states on the host streamed: a look is taken every few steps.

    on_device    what rests on the device beside them
    discipline   for which it was predicted
    """

    on_device: tuple[PlanRow, ...]
    discipline: Discipline
    figures: dict[str, float]


class StreamTrial:
    """Of one session, once for each k.

    untried   the plan to try instead of the present one; None: there is none, or it was tried
    kept      all states stay streamed since a trial
    """

    def __init__(self) -> None:
        self.untried: Plan | None = None
        self.kept = False
        self._runs = False
        self._undisturbed: Profile | None = None
        self._predicted: _Predicted | None = None  # by it
        self._k: int | None = None  # for which it was tried

    def measured(self, profile: Profile, *, streaming: bool) -> None:
        """A profile was made, of steps with streamed updates or without."""
        if not streaming:
            self._undisturbed, self._predicted = profile, None

    def look(
        self, present: Plan, units: Sequence[Unit], steps_us: Sequence[float], discipline: Discipline,
        predict: Callable[[Profile, Plan, Discipline], dict[str, float]], has_room: Callable[[Plan], bool],
    ) -> None:
        """Find the plan to try. Where memory has no room for it now, it may be found later.

        steps_us     lengths of the last steps, newest last
        discipline   how the runtime works now
        predict      a plan's prediction by a profile
        has_room     whether memory holds a plan: gradients of what is streamed stay on the device
        """
        known = self.untried or self._undisturbed is None or self._k == present.k
        if known or len(steps_us) < _SEEN or not 0 < streamed_share(present) < 1:
            return
        assert self._undisturbed is not None
        now_us, why = median(steps_us[-_SEEN:]), "all states on the host are streamed"
        on_device = tuple(row for row in present.rows if row.placement.rests_on_device)
        if self._predicted is None or (self._predicted.on_device, self._predicted.discipline) != (on_device, discipline):
            figures = predict(self._undisturbed, with_share(present, units, 1.0, why), discipline)
            self._predicted = _Predicted(on_device, discipline, figures)
        predicted_us = self._predicted.figures["step_us"]
        if predicted_us > (1 - _GAIN) * now_us:
            return
        found = with_share(present, units, 1.0, why)
        if not has_room(found):
            return
        told = f"steps take {time_text(now_us)}; with {why} they were predicted at {time_text(predicted_us)}, so that is tried"
        self.untried = replace(found, predicted=dict(self._predicted.figures), notes=(*found.notes, told))

    def begun(self) -> None:
        """It is put in force."""
        assert self.untried is not None
        self._k, self._runs, self.untried = self.untried.k, True, None

    def ended(self, *, paid: bool) -> None:
        """A trial has ended, this one or another."""
        self.kept, self._runs = self._runs and paid, False

    def restart(self, plan: Plan) -> None:
        """Another plan is in force."""
        self.untried = None
        self.kept = self.kept and plan.k == self._k
