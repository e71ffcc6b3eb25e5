"""In which order a step needs its units, as the last step has shown.

    needed(unit)    a node needs it now; gives the units that came after it in the last step
    stepped()       a step is over: what it needed is the order from now on

A step that needs others, or in another order (an evaluation in between), finds its place again at
the next unit that it shares with the last one.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import suppress
from typing import Final

_MOST: Final = 1 << 16  # uses that are noted of a step: a loop may never call step()


class FetchOrder:
    """The order of one session."""

    def __init__(self) -> None:
        self._last: list[int] = []
        self._now: list[int] = []
        self._at = 0  # in `_last`: what is expected next

    @property
    def units(self) -> Set[int]:
        """What the last step needed."""
        return set(self._last)

    def needed(self, unit: int, ahead: int, *, evaluates: bool = False) -> Sequence[int]:
        """The units to bring ahead of need, at most `ahead`, the next one first.

        evaluates   no backward is to come: this is no part of a step
        """
        if not evaluates and len(self._now) < _MOST:
            self._now.append(unit)
        place = self._find(unit)
        if place is None:
            return ()
        self._at = place + 1
        return self._last[self._at : self._at + ahead]

    def stepped(self) -> None:
        """A `step()` was called."""
        if self._now:
            self._last = self._now
        self._now, self._at = [], 0

    def _find(self, unit: int) -> int | None:
        for begin in (self._at, 0):
            with suppress(ValueError):
                return self._last.index(unit, begin)
        return None
