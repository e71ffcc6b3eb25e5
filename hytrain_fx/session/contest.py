"""When updates begin: before `step()`, by all workers or by half of them, or with it.

The ways are run and timed, and the fastest stays. No model of the machine says which that is. Early
updates use time in which the CPU would be idle. But they also slow the thread that launches the
backward, and with it `step()`, from which on weights and streamed states may travel. The cause is
most likely that the workers take up the host's memory, and that thread's caches are cold. On one
H100 a GPT-2 XL took 0.27 to 0.32 s a step with updates that began with `step()`, and 0.31 to 0.40 s
with earlier ones. A ConvNeXtV2-H took 0.19 s, and 0.16 to 0.18 s with earlier ones. On an H200 a
Whisper took 196 ms, and 209 with earlier ones, while the CPU was idle for 85 ms of each step. Half
of the workers should leave more of the memory to that thread. They are timed where all of them have
lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

from hytrain_fx.ir.figures import time_text

_SETTLING: Final = 30
"""Steps after a change, which are not timed: the plan follows it (planning/controller.py)."""
_TIMED: Final = 24  # steps
_REST: Final = 2000  # steps after which the ways are timed again, as loops and machines change
_GAIN: Final = 0.01  # share of a step that early updates must gain: they take memory on the host


class Way(Enum):
    """When updates begin, and by how many workers."""

    WITH_STEP = "where they begin with it"
    EARLY = "a step"
    EARLY_BY_HALF = "by half of the workers"


class Contest:
    """Times the ways of one loop, one after the other.

        way     the one in force
        why     what was found, in a sentence; None before they have been timed

    `halves`: whether half of the workers are fewer than all. `clock` gives seconds.
    """

    def __init__(self, halves: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self.way = Way.WITH_STEP
        self.why: str | None = None
        self._halves = halves
        self._clock = clock
        self._last_s: float | None = None  # when the last step ended
        self._steps_s: list[float] = []  # in the way in force
        self._needed = _SETTLING + _TIMED
        self._took_s: dict[Way, float] = {}  # a step

    @property
    def early(self) -> bool:
        """Whether updates begin before `step()`."""
        return self.way is not Way.WITH_STEP

    def early_workers(self, workers: int) -> int:
        """How many of the workers update before `step()`."""
        return workers // 2 if self.way is Way.EARLY_BY_HALF else workers

    def try_first(self, early: bool) -> None:
        """Whether early updates are timed first, unless timing has begun."""
        if not self._took_s and self._last_s is None and self.why is None:
            self.way = Way.EARLY if early else Way.WITH_STEP

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
        self._took_s[self.way] = middle_mean(self._steps_s[-_TIMED:])
        self._steps_s.clear()
        self._needed = _SETTLING + _TIMED
        untimed = self._untimed()
        if untimed is None:
            self._decide()
        else:
            self.way = untimed

    def _untimed(self) -> Way | None:
        """The next to be timed; half of the workers only where all of them have lost."""
        for way in (Way.WITH_STEP, Way.EARLY):
            if way not in self._took_s:
                return way
        tries_half = self._halves and not self._gains(Way.EARLY) and Way.EARLY_BY_HALF not in self._took_s
        return Way.EARLY_BY_HALF if tries_half else None

    def _gains(self, way: Way) -> bool:
        return self._took_s[way] < (1 - _GAIN) * self._took_s[Way.WITH_STEP]

    def _decide(self) -> None:
        fastest = min(self._took_s, key=self._took_s.__getitem__)
        self.way = fastest if self._gains(fastest) else Way.WITH_STEP
        times = [f"{time_text(self._took_s[way] * 1e6)} {way.value}" for way in (Way.EARLY, Way.EARLY_BY_HALF, Way.WITH_STEP)
                 if way in self._took_s]
        chosen = {Way.WITH_STEP: "with it", Way.EARLY: "before it", Way.EARLY_BY_HALF: f"before it, {Way.EARLY_BY_HALF.value}"}[self.way]
        self.why = f"updates that begin before step() were tried: {', '.join(times)}; they begin {chosen}"
        self._took_s.clear()
        self._needed = _REST


def middle_mean(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter: of steps, without hitches."""
    ordered, cut = sorted(values), len(values) // 4
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)
