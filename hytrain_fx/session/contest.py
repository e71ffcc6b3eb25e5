"""Whether updates begin before `step()` or with it: both ways are run and timed, the faster stays.

No model of the machine says which is. Early updates use time in which the CPU would be idle. But
they also slow the thread that launches the backward, and with it `step()`, from which on weights
and streamed states may travel. On one H100 a GPT-2 XL took 0.27 to 0.32 s a step with updates that
began with `step()`, and 0.31 to 0.40 s with earlier ones. A ConvNeXtV2-H took 0.19 s, and 0.16 to
0.18 s with earlier ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from hytrain_fx.ir.figures import time_text

_SETTLING: Final = 30
"""Steps after a change, which are not timed: the plan follows it (planning/controller.py)."""
_TIMED: Final = 24  # steps
_REST: Final = 2000  # steps after which both ways are timed again, as loops and machines change
_GAIN: Final = 0.01  # share of a step that early updates must gain: they take memory on the host


class Contest:
    """Times both ways of one loop, one after the other.

        early   the way in force: whether updates begin before `step()`
        why     what was found, in a sentence; None before both have been timed

    `clock` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.early = False
        self.why: str | None = None
        self._clock = clock
        self._last_s: float | None = None  # when the last step ended
        self._steps_s: list[float] = []  # in the way in force
        self._needed = _SETTLING + _TIMED
        self._took_s: dict[bool, float] = {}  # a step, by way

    def try_first(self, early: bool) -> None:
        """The way that is timed first, unless that has begun."""
        if not self._took_s and self._last_s is None and self.why is None:
            self.early = early

    def pause(self) -> None:
        """A step was none of this loop: the way in force is timed again."""
        self._last_s = None
        self._steps_s.clear()

    def stepped(self) -> None:
        """A step has ended."""
        now_s = self._clock()
        if self._last_s is not None:
            self._steps_s.append(now_s - self._last_s)
        self._last_s = now_s
        if len(self._steps_s) < self._needed:
            return
        self._took_s[self.early] = middle_mean(self._steps_s[-_TIMED:])
        self._steps_s.clear()
        self._needed = _SETTLING + _TIMED
        if len(self._took_s) == 1:
            self.early = not self.early
        else:
            self._decide()

    def _decide(self) -> None:
        early_s, with_step_s = self._took_s[True], self._took_s[False]
        self.early = early_s < (1 - _GAIN) * with_step_s
        chosen = "before it" if self.early else "with it"
        self.why = (f"updates that begin before step() were tried: {time_text(early_s * 1e6)} a step, {time_text(with_step_s * 1e6)} where "
                    f"they begin with it; they begin {chosen}")
        self._took_s.clear()
        self._needed = _REST


def middle_mean(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter: of steps, without hitches."""
    ordered, cut = sorted(values), len(values) // 4
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)
