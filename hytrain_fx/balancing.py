"""Watches when the updates of running steps end, and says when a better streamed share is due (`cost_model/balance.py`)."""

from __future__ import annotations

from dataclasses import replace

from hytrain_fx.cost_model.balance import balance_reason, balanced_share, streamed_share, with_share
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.task_graph import Unit
from hytrain_fx.runtime.engine import FinishTimes

_SETTLING_STEPS = 2  # after a move: the step that moved, and the one whose first updates ran in its wake
_SEEN_STEPS = 4
_NOTE = "the streamed share was balanced"  # begins the note about it


class Balancing:
    """The ends of the last steps under one plan."""

    def __init__(self) -> None:
        self._ends_us: list[tuple[float, float]] = []
        self._settling = _SETTLING_STEPS

    def restart(self) -> None:
        """Another plan is in force."""
        self._ends_us.clear()
        self._settling = _SETTLING_STEPS

    def saw(self, ends: FinishTimes) -> None:
        """A step has ended; those without both kinds of update tell nothing."""
        if self._settling:
            self._settling -= 1
        elif ends.cpu_us and ends.streamed_us:
            self._ends_us.append((ends.cpu_us, ends.streamed_us))

    def better(self, plan: Plan, units: tuple[Unit, ...], step_us: float, steps_done: int) -> Plan | None:
        """A plan with another share, where enough steps were seen and their updates did not end together."""
        if len(self._ends_us) < _SEEN_STEPS:
            return None
        seen, self._ends_us = self._ends_us, []
        share = streamed_share(plan)
        wanted = balanced_share(share, seen, step_us)
        if wanted is None:
            return None
        why = balance_reason(seen, steps_done)
        new = with_share(plan, units, wanted, why)
        if new.rows == plan.rows:
            return None
        notes = [note for note in plan.notes if not note.startswith(_NOTE)]
        return replace(new, notes=(*notes, f"{_NOTE} from {share:.0%} to {streamed_share(new):.0%}: {why}"))

