"""A schedule is checked when it is made."""

from __future__ import annotations

import pytest

from hytrain_fx.errors import PlanError
from hytrain_fx.ir.schedule import Interval, Schedule
from hytrain_fx.ir.task_graph import Resource, TaskId, TaskKind

BACKWARD, UPDATE = TaskId(TaskKind.BACKWARD, 0), TaskId(TaskKind.CPU_UPDATE, 0)


def test_figures_of_a_schedule() -> None:
    """Busy time, shares and total stall follow from intervals, makespan and stalls."""
    s = Schedule((Interval(BACKWARD, Resource.GPU, 0.0, 40.0), Interval(UPDATE, Resource.CPU, 40.0, 60.0)), 80.0, (20.0, 5.0))
    assert s.busy_us(Resource.GPU) == 40.0
    assert s.busy_share(Resource.CPU) == 0.25
    assert s.idle_share(Resource.H2D) == 1.0
    assert s.stall_us == 25.0
    assert s.of(UPDATE) == s.on(Resource.CPU)


def test_one_resource_twice_at_once_is_refused() -> None:
    """Two intervals that overlap on one resource are an error that names both tasks.

    On two resources they are fine.
    """
    first, second = Interval(BACKWARD, Resource.GPU, 0.0, 40.0), Interval(TaskId(TaskKind.FORWARD, 0), Resource.GPU, 39.0, 50.0)
    with pytest.raises(PlanError, match=r"forward\(0\).*backward\(0\)"):
        Schedule((first, second), 50.0, (0.0,))
    Schedule((first, Interval(UPDATE, Resource.CPU, 39.0, 50.0)), 50.0, (0.0,))


@pytest.mark.parametrize("span", [(10.0, 5.0), (-1.0, 5.0), (40.0, 60.0)])
def test_spans_outside_the_step_are_refused(span: tuple[float, float]) -> None:
    """An interval that runs backwards, starts before 0 or ends after the makespan is an error."""
    with pytest.raises(PlanError, match="expected a span inside"):
        Schedule((Interval(UPDATE, Resource.CPU, *span),), 50.0, (0.0,))


def test_touching_intervals_are_accepted() -> None:
    """An interval may start at the instant the one before it ends."""
    s = Schedule((Interval(UPDATE, Resource.CPU, 10.0, 20.0), Interval(UPDATE, Resource.CPU, 0.0, 10.0)), 20.0, (0.0,))
    assert [i.start_us for i in s.of(UPDATE)] == [0.0, 10.0]
