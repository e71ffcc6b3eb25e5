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
from dataclasses import replace
from statistics import median
from typing import Final

from hytrain_fx.cost_model.balance import streamed_share, with_share
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import Unit

_SEEN: Final = 8  # steps whose median is compared
_GAIN: Final = 0.05  # share of a step that it must be predicted to bring


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
        self._found: Plan | None = None  # by it, for the k that the plan has
        self._k: int | None = None  # for which it was tried

    def measured(self, profile: Profile, *, streaming: bool) -> None:
        """A profile was made, of steps with streamed updates or without."""
        if not streaming:
            self._undisturbed, self._found = profile, None

    def look(
        self, present: Plan, units: Sequence[Unit], steps_us: Sequence[float], predict: Callable[[Profile, Plan], Plan]
    ) -> None:
        """Find the plan to try.

        steps_us   lengths of the last steps, newest last
        predict    gives a plan with its prediction by a profile
        """
        known = self.untried or self._undisturbed is None or self._k == present.k
        if known or len(steps_us) < _SEEN or not 0 < streamed_share(present) < 1:
            return
        assert self._undisturbed is not None
        now_us, why = median(steps_us[-_SEEN:]), "all states on the host are streamed"
        if self._found is None or self._found.k != present.k:  # a look is taken every few steps
            self._found = predict(self._undisturbed, with_share(present, units, 1.0, why))
        found = self._found
        predicted_us = found.predicted["step_us"]
        if predicted_us > (1 - _GAIN) * now_us:
            return
        told = f"steps take {time_text(now_us)}; with {why} they were predicted at {time_text(predicted_us)}, so that is tried"
        self.untried = replace(found, notes=(*found.notes, told))

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
