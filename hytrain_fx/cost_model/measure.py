"""Times on the compute stream of the running program: when each layer's forward, backward and waiting began and ended.

The inserted nodes call `mark`; on a GPU a mark is a timing event (about 2 us of host time), on the CPU the host's clock.
Between two marks in a row exactly one thing happened, and the pair of kinds says what:

    FORWARD_BEGIN  -> WAIT_BEGIN(u)           input preparation, counted as forward of u
    WAIT_BEGIN(u)  -> WAIT_END(u)             stall of u
    WAIT_END(u)    -> WAIT_BEGIN | FORWARD_END   forward of u
    FORWARD_END    -> GRADS(u)                loss and backward of u
    GRADS(v)       -> GRADS(u)                backward of u
    GRADS(u)       -> BACKWARD_END            backward of u

Beside it stands when the launching thread came to each mark (one reading of the host's clock), and to the begin and end of
`optimizer.step()`, which are nothing on the compute stream.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from hytrain_fx.ir.task_graph import TaskKind
from hytrain_fx.torch_private import current_stream_of

MOST_MARKS = 1 << 15
"""Of one step; one with more of them (an evaluation between two steps) is not measured."""


class Mark(Enum):
    """What was reached."""

    FORWARD_BEGIN = "forward_begin"
    WAIT_BEGIN = "wait_begin"
    WAIT_END = "wait_end"
    FORWARD_END = "forward_end"
    GRADS = "grads"
    BACKWARD_END = "backward_end"
    STEP_BEGIN = "step_begin"  # of the launching thread only
    STEP_END = "step_end"


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Microseconds of one step by unit."""

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    stall_us: tuple[float, ...]


class StepMarks:
    """Marks of the running step and the times of the last few finished ones."""

    def __init__(self, device: torch.device, keep_steps: int = 9) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._running: list[tuple[Mark, int, float | torch.cuda.Event]] = []
        self._finished: deque[list[tuple[Mark, int, float | torch.cuda.Event]]] = deque(maxlen=keep_steps)
        self._launching: list[tuple[Mark, int, float]] = []
        self._launched: deque[list[tuple[Mark, int, float]]] = deque(maxlen=keep_steps)
        self._too_many = False  # in the running step
        self._clock_stream: torch.cuda.Stream | None = None
        self._stream_handle = current_stream_of(device) if self._cuda else None
        self._streams: dict[int, torch.cuda.Stream] = {}  # by handle: to make the object takes longer than to record an event
        self._spare: list[torch.cuda.Event] = []  # events of steps that were forgotten: they are made and freed under the driver's lock
        self.enabled = True

    def mark(self, kind: Mark, unit: int = -1) -> None:
        """Note that the compute stream has reached `kind` of unit `unit` at this point."""
        if not self.enabled or self._too_many:
            return
        if len(self._running) == MOST_MARKS:
            self._drop_running()
            self._too_many = True
            return
        now_us = time.perf_counter() * 1e6
        self._launching.append((kind, unit, now_us))
        if self._stream_handle is not None:
            handle = self._stream_handle()
            stream = self._streams.get(handle)
            if stream is None:
                stream = self._streams[handle] = torch.cuda.current_stream(self._device)
            event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
            event.record(stream)
            self._running.append((kind, unit, event))
        else:
            self._running.append((kind, unit, now_us))

    def note(self, kind: Mark) -> None:
        """Note that the launching thread has come to `kind`, which is no point of the compute stream."""
        if self.enabled and not self._too_many:
            self._launching.append((kind, -1, time.perf_counter() * 1e6))

    def end_step(self) -> None:
        """Close the running step; one without a backward, or with more than MOST_MARKS, is dropped."""
        if any(kind is Mark.BACKWARD_END for kind, _, _ in self._running):
            if len(self._finished) == self._finished.maxlen:
                self._spare_events(self._finished.popleft())
            self._finished.append(self._running)
            self._launched.append(self._launching)
            self._running = []  # its events are remembered
        self._drop_running()
        self._too_many = False

    def _drop_running(self) -> None:
        self._spare_events(self._running)
        self._running, self._launching = [], []

    def _spare_events(self, marks: list[tuple[Mark, int, float | torch.cuda.Event]]) -> None:
        self._spare += [event for _, _, event in marks if isinstance(event, torch.cuda.Event)]

    def clear(self) -> None:
        """Forget the finished steps, as after a change of plan."""
        for marks in self._finished:
            self._spare_events(marks)
        self._finished.clear()
        self._launched.clear()

    def settle(self) -> None:
        """Wait until the device has reached every mark of the finished steps."""
        for marks in self._finished:
            last = marks[-1][2]
            if isinstance(last, torch.cuda.Event):
                with torch.cuda.device(self._device):  # see _reached
                    last.synchronize()  # not the device: copies and updates of the last step may run on

    def _reached(self) -> list[list[tuple[Mark, int, float | torch.cuda.Event]]]:
        """The finished steps that the device is through with, oldest first; waits for the first alone, so that there is one."""
        reached: list[list[tuple[Mark, int, float | torch.cuda.Event]]] = []
        for marks in self._finished:
            last = marks[-1][2]
            if isinstance(last, torch.cuda.Event):
                with torch.cuda.device(self._device):  # torch asks as the thread's own device: a context would be made on that
                    if not last.query():
                        if reached:
                            break
                        last.synchronize()
            reached.append(marks)
        return reached

    def _clock_us(self) -> Callable[[float | torch.cuda.Event], float]:
        """A function that gives the time of a mark that was reached on the host's monotonic clock, in microseconds."""
        if not self._cuda:
            return lambda mark: _elapsed_us(0.0, mark)  # marks on the CPU are on that clock
        if self._clock_stream is None:  # with no work on it, so that to wait for it is not to wait for the device; and of a priority of
            self._clock_stream = torch.cuda.Stream(self._device, priority=-1)  # its own: streams of one share a few queues to the device
        now = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._device):
            now.record(self._clock_stream)
            now.synchronize()
        now_us = time.perf_counter() * 1e6
        return lambda mark: now_us - _elapsed_us(mark, now)

    def finished(self) -> list[list[tuple[Mark, int, float]]]:
        """The marks of the finished steps that the device is through with, oldest first, with their times on the host's monotonic clock in
        microseconds. After `settle` these are all."""
        reached, clock_us = self._reached(), self._clock_us()
        return [[(kind, unit, clock_us(at)) for kind, unit, at in marks] for marks in reached]

    def launched(self) -> list[list[tuple[Mark, int, float]]]:
        """The finished steps' marks as the launching thread came to them, with the begin and end of `step()`, on the same clock."""
        return [list(marks) for marks in self._launched]

    @property
    def steps(self) -> int:
        """Number of finished steps at hand."""
        return len(self._finished)

    def median(self, units: int) -> UnitTimes:
        """Medians over the finished steps that the device is through with, per unit. Raises ValueError without a finished step."""
        if not self._finished:
            raise ValueError("no finished step has been measured")
        steps = [_unit_times(marks, units) for marks in self._reached()]
        return UnitTimes(*(_median_rows([getattr(s, name) for s in steps]) for name in ("forward_us", "backward_us", "stall_us")))


def _median_rows(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def _elapsed_us(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return float(begin.elapsed_time(end)) * 1e3
    assert isinstance(end, float)
    return end - begin


def between(mark: Mark, next_mark: Mark, unit: int, next_unit: int) -> tuple[TaskKind, int] | None:
    """What happened between two marks in a row, and of which unit, by the table at the top; None where it was nothing of the three."""
    if mark is Mark.FORWARD_BEGIN and next_mark is Mark.WAIT_BEGIN:
        return TaskKind.FORWARD, next_unit
    if mark is Mark.WAIT_BEGIN:
        return TaskKind.WAIT, unit
    if mark is Mark.WAIT_END and next_mark in (Mark.WAIT_BEGIN, Mark.FORWARD_END):
        return TaskKind.FORWARD, unit
    if mark in (Mark.FORWARD_END, Mark.GRADS) and next_mark is Mark.GRADS:
        return TaskKind.BACKWARD, next_unit
    if mark is Mark.GRADS and next_mark is Mark.BACKWARD_END:
        return TaskKind.BACKWARD, unit
    return None


def _unit_times(marks: Sequence[tuple[Mark, int, float | torch.cuda.Event]], units: int) -> UnitTimes:
    us = {kind: [0.0] * units for kind in (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WAIT)}
    for (mark, unit, begin), (next_mark, next_unit, end) in itertools.pairwise(marks):
        found = between(mark, next_mark, unit, next_unit)
        if found is not None:
            kind, of = found
            us[kind][of] += _elapsed_us(begin, end)
    return UnitTimes(tuple(us[TaskKind.FORWARD]), tuple(us[TaskKind.BACKWARD]), tuple(us[TaskKind.WAIT]))
