"""Steps that are read for a profile: when they ended, what the engine did in them, and what launching took."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hytrain_fx.planning.marks import StepMarks
from hytrain_fx.runtime.engine import Engine, TaskRecord


@dataclass(frozen=True, slots=True)
class ReadSteps:
    """What was read.

    ends_us        when the steps ended, on the records' clock, with the end of the step before the first: one more than steps
    records        the engine's
    launching_us   of each step where it is known (`FinishTimes`)
    """

    ends_us: tuple[float, ...]
    records: list[TaskRecord]
    launching_us: tuple[float, ...]


class StepReader:
    """Reads steps between `begin` and `take`; outside of that the engine keeps no records, which cost memory."""

    def __init__(self, engine: Engine, marks: StepMarks) -> None:
        self._engine = engine
        self._marks = marks
        self._ends_us: list[float] = []
        self._records: list[TaskRecord] = []
        self._launching_us: list[float] = []

    @property
    def is_reading(self) -> bool:
        """Whether steps are being read, or were and have not been taken."""
        return bool(self._ends_us)

    @property
    def steps(self) -> int:
        """Steps read so far."""
        return max(len(self._ends_us) - 1, 0)

    def begin(self) -> None:
        """The step to come is the first."""
        self._engine.take_records()  # of steps before
        self._marks.clear()
        self._engine.record(True)
        self._records, self._launching_us = [], []
        self._ends_us = [time.perf_counter() * 1e6]

    def step_ended(self) -> None:
        """One more step."""
        self._ends_us.append(time.perf_counter() * 1e6)
        self._launching_us.append(self._engine.finish_times().launching_us)
        self._records += self._engine.take_records()  # all at the end would take longer than a GPU has work for

    def end(self) -> None:
        """No more steps; what was read stays until it is taken."""
        self._engine.record(False)

    def forget(self) -> None:
        """What was read is of no use: the records are somebody else's."""
        self._ends_us = []

    def take(self) -> ReadSteps:
        """What was read, with what has ended since."""
        read = ReadSteps(tuple(self._ends_us), [*self._records, *self._engine.take_records()], tuple(us for us in self._launching_us if us))
        self._ends_us, self._records = [], []
        return read
