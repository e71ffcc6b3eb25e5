"""From recorded steps to a profile: sums by step, medians, and the times of what did not run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.task_graph import Unit
from hytrain_fx.planning.marks import MOST_MARKS, Mark, StepMarks
from hytrain_fx.planning.profiling import Measured, Probes, ReadSteps, _commit_us, build_profile, cpu_steps_us, worker_lengths_us
from hytrain_fx.runtime.engine import Stage, TaskRecord
from hytrain_fx.runtime.probe import full_duplex_us_per_byte

CPU, GPU, STREAM = Placement.CPU, Placement.GPU, Placement.STREAM
STEP_US = 1000.0


RATES = Probes(lambda: 0.5, lambda: (2.0, 3.0))


def measured(
    records: Sequence[TaskRecord], placement: Sequence[Placement], *, steps: int = 3, device: str = "cpu",
    launching_us: tuple[float, ...] = (),
) -> Measured:
    """Two units of rows of 100 and 300 elements each; steps of 1000 us from 0 on."""
    marks = StepMarks(torch.device("cpu"))
    for kind, unit in ((Mark.FORWARD_BEGIN, -1), (Mark.WAIT_BEGIN, 0), (Mark.WAIT_END, 0), (Mark.FORWARD_END, -1), (Mark.GRADS, 0),
                       (Mark.BACKWARD_END, -1)):
        marks.mark(kind, unit)
    marks.end_step()
    units = [Unit(i, f"layer.{i}", 400, ("a", "b"), 800, param_numels=(100, 300), grain_params=50) for i in range(2)]
    ends = tuple(STEP_US * i for i in range(steps + 1))
    read = ReadSteps(ends, list(records), launching_us)
    numels, unit_of = dict(enumerate([100, 300, 100, 300])), dict(enumerate([0, 0, 1, 1]))
    return Measured(units, marks, read, unit_of, numels, dict(enumerate(placement)), 1, torch.device(device))


def record(stage: Stage, row: int, begin: float, us: float, worker: int = 0, workers: int = 1) -> TaskRecord:
    return TaskRecord(stage, row, 0, worker, begin, begin + us, workers)


def every_step(stage: Stage, row: int, us: Sequence[float], at: float = 500.0) -> list[TaskRecord]:
    return [record(stage, row, STEP_US * step + at, length) for step, length in enumerate(us)]


def test_a_unit_takes_the_median_of_its_steps_in_full_size() -> None:
    """With 100 of 400 elements on the CPU, the unit's time is four times the median of the steps.

    An odd step changes nothing.
    """
    records = every_step(Stage.CPU_UPDATE, 0, [10.0, 12.0, 400.0]) + every_step(Stage.CPU_UPDATE, 2, [20.0, 20.0, 20.0])
    found = build_profile(measured(records, [CPU, GPU, CPU, GPU]), RATES, None, streams=False)
    assert [u.cpu_update_us for u in found.units] == [48.0, 80.0]
    assert [u.gpu_update_us for u in found.units] == [200.0, 200.0]  # no records: probed
    assert not found.can_stream
    assert found.units[0].param_numels == (100, 300)
    assert found.units[0].grain_params == 50


def test_what_did_not_run_keeps_its_time_as_the_others_changed() -> None:
    """A unit on the device keeps its earlier CPU time, times the change of the unit that ran.

    Without an earlier time it gets that unit's rate.
    """
    all_on_cpu = every_step(Stage.CPU_UPDATE, 0, [10.0] * 3) + every_step(Stage.CPU_UPDATE, 2, [30.0] * 3)
    before = build_profile(measured(all_on_cpu, [CPU] * 4), RATES, None, streams=False)
    slower = measured(every_step(Stage.CPU_UPDATE, 2, [60.0] * 3), [GPU, GPU, CPU, CPU])
    assert [u.cpu_update_us for u in build_profile(slower, RATES, before, streams=False).units] == [20.0, 60.0]
    assert [u.cpu_update_us for u in build_profile(slower, RATES, None, streams=False).units] == [60.0, 60.0]
    nothing = measured([], [GPU] * 4)
    assert [u.cpu_update_us for u in build_profile(nothing, RATES, before, streams=False).units] == [10.0, 30.0]


def test_streaming_times_come_from_records_else_from_the_probe() -> None:
    """Streamed rows give their unit's times, and other units get the same rate.

    With nothing streamed the link is probed.
    """
    placement = [CPU, STREAM, CPU, CPU]
    records = every_step(Stage.STREAM_IN, 1, [30.0] * 3) + every_step(Stage.STREAM_OUT, 1, [60.0] * 3)
    found = build_profile(measured(records, placement), RATES, None, streams=True)
    assert [(u.stream_in_us, u.stream_out_us) for u in found.units] == [(40.0, 80.0)] * 2
    probed = build_profile(measured([], [CPU] * 4), RATES, None, streams=True)
    assert [(u.stream_in_us, u.stream_out_us) for u in probed.units] == [(800.0, 1200.0)] * 2


def test_rows_of_probes_and_steps_outside_are_left_out() -> None:
    """Records of unknown rows, or from before the first or after the last step, do not count."""
    records = [record(Stage.CPU_UPDATE, row, begin, 40.0) for row, begin in ((9, 100.0), (0, -50.0), (0, 3100.0))]
    assert cpu_steps_us(measured(records, [CPU] * 4)) == [0.0, 0.0, 0.0]


def test_a_worker_that_could_run_and_does_not_counts_as_busy() -> None:
    """A worker is late by 50 us after the commit (at 1000), and by 20 between two updates.

    Both are the CPU's cost.
    """
    landed = [record(Stage.D2H, row, 600.0, 10.0) for row in (0, 2)]
    updates = [record(Stage.CPU_UPDATE, 0, 1050.0, 100.0), record(Stage.CPU_UPDATE, 2, 1170.0, 100.0)]
    of = measured([*landed, *updates], [CPU] * 4)
    assert worker_lengths_us(of, updates) == [150.0, 120.0]


def test_waiting_for_a_gradient_is_not_the_workers_time() -> None:
    """On a GPU a gradient lands after the commit: time before is idle, time after is not.

    The gaps of other workers stay apart.
    """
    landed = [record(Stage.D2H, 0, 1000.0, 100.0), record(Stage.D2H, 2, 1000.0, 500.0)]
    updates = [record(Stage.CPU_UPDATE, 0, 1110.0, 100.0, workers=2), record(Stage.CPU_UPDATE, 2, 1500.0, 100.0, workers=2),
               record(Stage.CPU_UPDATE, 3, 1505.0, 100.0, worker=1, workers=2)]
    of = measured([*landed, *updates], [CPU] * 4, device="cuda")
    assert worker_lengths_us(of, updates) == [110.0, 100.0, 105.0]
    assert cpu_steps_us(of)[1] == pytest.approx(315.0 / 2)


def test_updates_count_as_work_of_those_that_share_them() -> None:
    """A worker that is left out before the step takes no part in the time of updates there."""
    alone, both = ([record(Stage.CPU_UPDATE, row, 1000 + 100.0 * row, 60.0, workers=workers) for row in range(4)] for workers in (1, 2))
    assert cpu_steps_us(measured(alone, [CPU] * 4))[1] == pytest.approx(240.0)
    assert cpu_steps_us(measured(both, [CPU] * 4))[1] == pytest.approx(120.0)
    assert cpu_steps_us(measured([*alone[:2], *both[2:]], [CPU] * 4))[1] == pytest.approx(180.0)


@given(starts=st.lists(st.floats(0, 2900), min_size=1, max_size=12), lengths=st.lists(st.floats(0, 50), min_size=12, max_size=12))
def test_no_update_counts_less_than_it_ran(starts: list[float], lengths: list[float]) -> None:
    """Whatever is known of gradients, an update counts at least its own length.

    One worker counts no more than the time there is.
    """
    begins, at = [], 0.0
    for start, us in zip(sorted(starts), lengths, strict=False):
        at = max(at, start)
        begins.append(record(Stage.CPU_UPDATE, 0, at, us))
        at += us
    of = measured([record(Stage.D2H, 0, 10.0, 10.0), *begins], [CPU] * 4)
    counted = worker_lengths_us(of, begins)
    assert all(us >= r.end_us - r.begin_us - 1e-9 for us, r in zip(counted, begins, strict=True))
    assert sum(counted) <= begins[-1].end_us + 1e-6


def test_launching_is_the_median_of_steps_where_it_is_known() -> None:
    """A step that waited for the device has no launching time.

    Where no step has one, the profile says 0.
    """
    for known, expected in (((), 0.0), ((300.0,), 300.0), ((200.0, 900.0, 250.0), 250.0)):
        profile = build_profile(measured([], [CPU] * 4, launching_us=known), RATES, None, streams=False)
        assert profile.launching_us == expected


def test_no_measured_step_is_an_error() -> None:
    """Without a finished step, or an interval between two, there is no profile."""
    of = measured([], [CPU] * 4)
    with pytest.raises(PlanError, match="no training step has been measured"):
        build_profile(replace(of, steps=ReadSteps((0.0,), [], ())), RATES, None, streams=False)
    with pytest.raises(PlanError, match="no training step has been measured"):
        build_profile(replace(of, marks=StepMarks(torch.device("cpu"))), RATES, None, streams=False)


class Clock:
    """Stands for the host's clock; `mark` first moves it on by `after_us`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us, self.marks = 0.0, StepMarks(torch.device("cpu"))
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_us * 1e-6)

    def mark(self, kind: Mark, after_us: float, unit: int = 0) -> None:
        self.now_us += after_us
        self.marks.mark(kind, unit)

    def micro_batch(self, forward_us: float, backward_us: float) -> None:
        self.mark(Mark.FORWARD_BEGIN, 3.0)
        self.mark(Mark.WAIT_BEGIN, 0.0)
        self.mark(Mark.WAIT_END, 5.0)
        self.mark(Mark.FORWARD_END, forward_us)
        self.mark(Mark.GRADS, backward_us)
        self.mark(Mark.BACKWARD_END, 0.0)

    def kept(self) -> int:
        return sum(len(of.marks) for of in self.marks._running)


@pytest.mark.parametrize("count", [1, 2, 700, 1000, 5000])
def test_marks_of_many_micro_batches_keep_the_first_and_the_last(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, and the step is measured.

    Its times are those of the first forward and the last backward, and what is between them.
    """
    clock = Clock(monkeypatch)
    for _ in range(count):
        clock.micro_batch(20.0, 30.0)
        assert clock.kept() <= MOST_MARKS + 6
    clock.marks.end_step()
    assert clock.marks.captured
    times = clock.marks.median(1)
    assert times.forward_us + times.backward_us + times.stall_us == pytest.approx((20.0, 30.0, 5.0))
    assert times.between_us == pytest.approx((count - 1) * (30.0 + 3.0 + 5.0 + 20.0))
    marks = clock.marks.finished()[0]
    assert marks[0][2] == pytest.approx(3.0)
    assert marks[-1][2] == pytest.approx(clock.now_us)
    assert (Mark.LEFT_OUT in [kind for kind, _, _ in marks]) == (count * 6 > MOST_MARKS)


@pytest.mark.parametrize("order", ["FFFBBB", "FFBFBB", "FBFBFB"])
def test_a_pipeline_order_has_its_last_backward(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward may come right after another one. Between two steps the stage stands still."""
    clock = Clock(monkeypatch)
    for _ in range(3):
        clock.now_us += 700.0
        for what in order:
            for unit in (0, 1) if what == "F" else (1, 0):
                if what == "B":
                    clock.mark(Mark.GRADS, 30.0 + unit, unit)
                    continue
                if unit == 0:
                    clock.mark(Mark.FORWARD_BEGIN, 0.0)
                clock.mark(Mark.WAIT_BEGIN, 10.0 * unit, unit)
                clock.mark(Mark.WAIT_END, 0.0, unit)
            clock.mark(Mark.FORWARD_END if what == "F" else Mark.BACKWARD_END, 20.0 if what == "F" else 0.0)
        clock.marks.end_step()
    times = clock.marks.median(2)
    assert times.forward_us == pytest.approx((10.0, 20.0))
    assert times.backward_us == pytest.approx((30.0, 31.0))
    assert times.between_us == pytest.approx(2 * 30.0 + 2 * 61.0)
    assert times.apart_us == pytest.approx(700.0)


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_is_committed_after_the_begin_of_its_last_backward(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches before it are no time in which updates could have begun."""
    clock = Clock(monkeypatch)
    ends_us = [0.0]
    for _ in range(3):
        for _ in range(count):
            clock.micro_batch(20.0, 30.0)
        clock.marks.end_step()
        ends_us.append(clock.now_us - 30.0 + 12.0)  # the launching thread is ahead of the device
    of = replace(measured([], [CPU] * 4), marks=clock.marks, steps=ReadSteps(tuple(ends_us), [], ()))
    assert _commit_us(of) == pytest.approx(12.0)


def test_a_backward_of_several_graphs_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs end one by one; in a step with one micro-batch nothing is between."""
    clock = Clock(monkeypatch)
    for _ in range(2):
        clock.mark(Mark.FORWARD_BEGIN, 0.0)
        for unit in (0, 1):
            clock.mark(Mark.WAIT_BEGIN, 0.0, unit)
            clock.mark(Mark.WAIT_END, 5.0, unit)
        clock.mark(Mark.FORWARD_END, 20.0)
        for unit in (1, 0):
            clock.mark(Mark.GRADS, 30.0 + unit, unit)
            clock.mark(Mark.BACKWARD_END, 1.0)
    one = clock.marks
    one.end_step()
    assert one.median(2).backward_us == pytest.approx((31.0, 32.0))
    assert one.median(2).between_us == pytest.approx(63.0 + 30.0)


def test_gradients_from_outside_are_a_part_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes between a graph's end and a gradient of eager code is backward of its unit.

    Without a graph's end before it nothing is noted, and behind it the backward has ended.
    """
    clock = Clock(monkeypatch)
    clock.marks.gradient_outside(1)
    assert clock.kept() == 0
    clock.micro_batch(20.0, 30.0)
    for after_us in (40.0, 2.0):
        clock.now_us += after_us
        clock.marks.gradient_outside(1)
    clock.now_us += 7.0
    with clock.marks.held("read"):
        clock.now_us += 50.0
    clock.marks.end_step()
    found = clock.marks.median(2)
    assert found.backward_us == pytest.approx((30.0, 42.0))
    assert found.stall_us == pytest.approx((5.0, 0.0))


def test_forwards_without_a_backward_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long evaluation with gradients on is forgotten; the next training step is measured."""
    clock = Clock(monkeypatch)
    for _ in range(MOST_MARKS):
        clock.mark(Mark.FORWARD_BEGIN, 1.0)
        clock.mark(Mark.FORWARD_END, 1.0)
        assert clock.kept() <= MOST_MARKS + 2
    clock.micro_batch(20.0, 30.0)
    clock.marks.end_step()
    assert clock.marks.median(1).backward_us == pytest.approx((30.0,))


def test_what_the_library_holds_up_is_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits at a graph break, and reads of a weight between forward and backward, are stalls.

    They count neither as forward nor as backward.
    """
    clock = Clock(monkeypatch)

    def held(what: str, us: float) -> None:
        with clock.marks.held(what):
            clock.now_us += us

    clock.mark(Mark.FORWARD_BEGIN, 0.0)
    held("graph break", 1000.0)
    clock.mark(Mark.WAIT_BEGIN, 2.0)
    clock.mark(Mark.WAIT_END, 5.0)
    clock.mark(Mark.FORWARD_END, 20.0)
    held("read", 100.0)
    held("read", 200.0)
    clock.mark(Mark.GRADS, 30.0)
    clock.mark(Mark.BACKWARD_END, 1.0)
    held("read", 9000.0)  # after the backward it is no part of the step's times
    clock.marks.end_step()
    times = clock.marks.median(1)
    assert times.forward_us == pytest.approx((22.0,))
    assert times.stall_us == pytest.approx((1305.0,))
    assert times.backward_us == pytest.approx((31.0,))
    assert clock.marks.broken
    clock.micro_batch(20.0, 30.0)
    clock.marks.end_step()
    assert not clock.marks.broken


@given(fetches_us=st.lists(st.tuples(*[st.integers(0, 10_000)] * 3), min_size=1, max_size=6))
def test_waits_for_fetches_are_a_part_of_the_stalls(fetches_us: list[tuple[int, int, int]]) -> None:
    """However a unit's waits differ from step to step, the medians name no more than all."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        for of_units in fetches_us:
            clock.mark(Mark.FORWARD_BEGIN, 0.0)
            for unit, us in enumerate(of_units):
                clock.mark(Mark.WAIT_BEGIN, 0.0, unit)
                clock.mark(Mark.WAIT_END, 1.0, unit)
                with clock.marks.held("fetch"):
                    clock.now_us += us
            clock.mark(Mark.FORWARD_END, 20.0)
            clock.mark(Mark.BACKWARD_END, 0.0)
            clock.marks.end_step()
        times = clock.marks.median(3)
    assert 0 <= times.fetch_stall_us <= sum(times.stall_us)
    whole = [sum(of_units) for of_units in fetches_us]
    assert times.fetch_stall_us >= sum(times.stall_us) * min(us / (us + 3.0) for us in whole) - 1e-3
    assert times.held_us == 0


def test_a_step_without_a_captured_backward_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its marks are forgotten, and it does not count as captured."""
    clock = Clock(monkeypatch)
    clock.micro_batch(20.0, 30.0)
    clock.marks.end_step()
    clock.mark(Mark.FORWARD_BEGIN, 1.0)
    clock.marks.end_step()
    assert not clock.marks.captured
    assert clock.marks.steps == 1


def test_the_link_is_probed_both_ways() -> None:
    """With the model on the CPU both rates are those of the host's own copies.

    They are positive, and no more than the probe itself took.
    """
    begin_s = time.perf_counter()
    rates = full_duplex_us_per_byte(torch.device("cpu"))
    spent_us = (time.perf_counter() - begin_s) * 1e6
    assert all(0 < rate * (16 << 20) <= spent_us for rate in rates)


class Device:
    """Stands for a GPU that has reached some of its events; notes what was waited for."""

    given = reached = 0
    waited: ClassVar[list[int]] = []
    current: ClassVar[torch.device | None] = None  # of the thread


@contextlib.contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    Device.current = device
    yield
    Device.current = None


class FakeEvent:
    """An event of this GPU; its number is the milliseconds at which it is reached."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.number = 0

    def record(self, stream: str) -> None:
        if stream == "idle":
            self.number = Device.reached
            return
        Device.given += 1
        self.number = Device.given

    def query(self) -> bool:
        assert Device.current is not None, "asked as the thread's own device, on which a context would be made"
        return self.number <= Device.reached

    def synchronize(self) -> None:
        if not self.query():
            Device.waited.append(self.number)
            Device.reached = self.number

    def elapsed_time(self, end: FakeEvent) -> float:
        assert max(self.number, end.number) <= Device.reached
        return float(end.number - self.number)


def test_times_are_read_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that the device has not finished are ignored.

    Only if it has finished none, the first is waited for.
    """
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: "idle" if priority < 0 else "shares a queue")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
    monkeypatch.setattr(torch.cuda, "device", current_device)
    monkeypatch.setattr("hytrain_fx.planning.marks.current_stream_of", lambda device: lambda: 7)
    marks = StepMarks(torch.device("cuda"))
    for _ in range(3):
        for kind in (Mark.FORWARD_BEGIN, Mark.WAIT_BEGIN, Mark.WAIT_END, Mark.FORWARD_END, Mark.GRADS, Mark.BACKWARD_END):
            marks.mark(kind, 0)
        marks.end_step()
    assert len(marks.finished()) == 1
    assert Device.waited == [6]
    Device.reached = 14
    assert len(marks.finished()) == 2
    assert marks.median(1).forward_us == (2000.0,)
    assert Device.waited == [6]
    times_us = [at_us for _, _, at_us in marks.finished()[1]]
    assert [at_us - times_us[0] for at_us in times_us] == pytest.approx([0.0, 1000.0, 2000.0, 3000.0, 4000.0, 5000.0])
    marks.settle()
    assert len(marks.finished()) == marks.steps == 3
    assert Device.waited == [6, 18]


def test_marks_take_the_events_of_forgotten_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps are marked, the number of events is bounded.

    It is what the remembered steps and the running one have.
    """
    made: list[FakeEvent] = []

    class Counted(FakeEvent):
        def __init__(self, enable_timing: bool) -> None:
            super().__init__(enable_timing)
            made.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Counted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
    monkeypatch.setattr("hytrain_fx.planning.marks.current_stream_of", lambda device: lambda: 7)
    marks = StepMarks(torch.device("cuda"))
    for step in range(40):
        for kind in (Mark.FORWARD_BEGIN, Mark.FORWARD_END, *((Mark.BACKWARD_END,) if step % 3 else ())):
            marks.mark(kind)
        marks.end_step()
        if step == 25:
            marks.clear()
    assert len(made) == 10 * 3
