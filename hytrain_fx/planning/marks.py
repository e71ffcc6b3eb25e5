"""When each layer's forward, backward and waiting began and ended, from the running program.

These are times on its compute stream.

The inserted nodes call `mark`; on a GPU a mark is a timing event (about 2 us of host time), on the
CPU the host's clock. Between two marks in a row exactly one thing happened, and the pair of kinds
says what:

    FORWARD_BEGIN  -> WAIT_BEGIN(u)           input preparation, counted as forward of u
    WAIT_BEGIN(u)  -> WAIT_END(u)             stall of u
    WAIT_END(u)    -> WAIT_BEGIN | FORWARD_END   forward of u
    FORWARD_END    -> GRADS(u)                loss and backward of u
    GRADS(v)       -> GRADS(u)                backward of u
    GRADS(u)       -> BACKWARD_END            backward of u
    BACKWARD_END   -> GRADS(u)                backward of u, in another graph or micro-batch, or in
                                              code outside the graphs

Of several micro-batches a unit's times are those of its first forward and its last backward: an
update has to fit between that backward and the next step's first forward.

A stretch from HELD_BEGIN to HELD_END inside one of them is no work: there the library holds the
loop up (`HELD`). It counts as stall of the unit, and the marks around it are read as if it were not
there.

Marks are kept by micro-batch, the first and the last of a step where there are more than
MOST_MARKS.

Next to it stands when the launching thread came to each mark (one reading of the host's clock), and
to the begin and end of `optimizer.step()`, which are nothing on the compute stream.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import torch

from hytrain_fx.ir.task_graph import TaskKind
from hytrain_fx.planning.unit_times import FETCH, HELD, UnitTimes
from hytrain_fx.runtime.device_clock import At, ClockUs, DeviceClock, elapsed_us
from hytrain_fx.torch_private.tensors import current_stream_of

A = TypeVar("A")  # a time, or an event that has one
_KEPT_STEPS = 9
MOST_MARKS = 1 << 13
"""Marks kept of one step. Beyond that, whole micro-batches in the middle are forgotten."""
class Mark(Enum):
    """What was reached."""

    FORWARD_BEGIN = "forward_begin"
    WAIT_BEGIN = "wait_begin"
    WAIT_END = "wait_end"
    FORWARD_END = "forward_end"
    GRADS = "grads"
    BACKWARD_END = "backward_end"
    HELD_BEGIN = "held_begin"
    HELD_END = "held_end"
    # micro-batches between the marks before and after it; its time is the first one's
    LEFT_OUT = "left_out"
    STEP_BEGIN = "step_begin"  # of the launching thread only
    STEP_END = "step_end"


_WAIT_BEGINS, _WAIT_ENDS = (Mark.WAIT_BEGIN, Mark.HELD_BEGIN), (Mark.WAIT_END, Mark.HELD_END)
_Marks = list[tuple[Mark, int, At]]


@dataclass(slots=True)
class _MicroBatch:
    """The marks of a forward and what follows until the next one.

    `launching` says when the launching thread came to them.
    """

    marks: _Marks = field(default_factory=list)
    launching: list[tuple[Mark, int, float]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether a backward has ended in it."""
        return bool(self.marks) and self.marks[-1][0] is Mark.BACKWARD_END


@dataclass(frozen=True, slots=True)
class _Step:
    """The marks of a finished step."""

    marks: _Marks
    launching: list[tuple[Mark, int, float]]


class StepMarks:
    """Marks of the running step and the times of the last few finished ones.

    clock       what marks on the device are read with
    captured    whether the last step ran a captured backward
    broken      whether the last captured step waited for all weights at a graph break
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = DeviceClock(device)
        self._device = device
        self._running: list[_MicroBatch] = []
        self._count = 0  # of marks in the running step
        self._cut = 0  # how many of the first micro-batches stay; 0: all are kept
        self._finished: deque[_Step] = deque(maxlen=_KEPT_STEPS)
        self._stream_handle = current_stream_of(device) if device.type == "cuda" else None
        # by handle: making the object takes longer than recording an event
        self._streams: dict[int, torch.cuda.Stream] = {}
        # events of forgotten steps: making and freeing one takes the driver's lock
        self._spare: list[torch.cuda.Event] = []
        self.silent_thread = 0  # a thread that evaluates: it leaves no marks
        self.captured = self.broken = False
        self._breaks = 0  # in the running step

    def mark(self, kind: Mark, unit: int = -1) -> None:
        """Note that the compute stream has reached `kind` of unit `unit` at this point."""
        if self.is_silent:
            return
        of = self._micro_batch(kind)
        now_us = time.perf_counter() * 1e6
        of.launching.append((kind, unit, now_us))
        if self._stream_handle is not None:
            handle = self._stream_handle()
            stream = self._streams.get(handle)
            if stream is None:
                stream = self._streams[handle] = torch.cuda.current_stream(self._device)
            event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
            event.record(stream)
            of.marks.append((kind, unit, event))
        else:
            of.marks.append((kind, unit, now_us))
        self._count += 1
        if self._count > MOST_MARKS:
            self._leave_out()

    def gradient_outside(self, unit: int) -> None:
        """Note that autograd has just added what code outside the graphs makes of a gradient.

        What has passed since the last graph's end is backward of `unit`. A step that has run no
        captured backward yet is not measured.
        """
        if self._running and self._running[-1].ended:
            self.mark(Mark.GRADS, unit)
            self.mark(Mark.BACKWARD_END)

    def note(self, kind: Mark) -> None:
        """Note that the launching thread has come to `kind`, no point of the compute stream."""
        if self._running:
            self._running[-1].launching.append((kind, -1, time.perf_counter() * 1e6))

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Use it around what makes the loop wait in this library, outside a gate.

        `what` is a key of `HELD`.
        """
        if self.is_silent or not self._running or self._running[-1].ended:
            yield  # between a step's backward and the next forward nothing is measured
            return
        number = list(HELD).index(what)
        self._breaks += what == "graph break"
        self.mark(Mark.HELD_BEGIN, number)
        try:
            yield
        finally:
            self.mark(Mark.HELD_END, number)

    @property
    def is_silent(self) -> bool:
        """Whether this thread evaluates: its call of the model began without gradients."""
        return self.silent_thread != 0 and self.silent_thread == threading.get_ident()

    def _micro_batch(self, kind: Mark) -> _MicroBatch:
        """The one that a mark of this kind belongs to."""
        if not self._running or kind is Mark.FORWARD_BEGIN or self._running[-1].ended:
            self._running.append(_MicroBatch())
        return self._running[-1]

    def _leave_out(self) -> None:
        """Forget a whole micro-batch after the first ones, which may have half of the marks.

        The last one is still running.
        """
        if not self._cut:
            marks = itertools.accumulate(len(of.marks) for of in self._running)
            self._cut = max(sum(1 for count in marks if 2 * count <= MOST_MARKS), 1)
        if len(self._running) > self._cut + 1:
            gone = self._running.pop(self._cut)
            self._count -= len(gone.marks)
            self._spare_events(gone.marks)

    def end_step(self) -> None:
        """Close the running step; one without a captured backward is dropped."""
        self.captured = any(of.ended for of in self._running)
        if self.captured:
            self.broken = self._breaks > 0
            if len(self._finished) == self._finished.maxlen:
                self._spare_events(self._finished.popleft().marks)
            self._finished.append(self._joined())
            self._running = []  # its events are remembered
        for of in self._running:
            self._spare_events(of.marks)
        self._running = []
        self._count = self._cut = self._breaks = 0

    def _joined(self) -> _Step:
        """The running step, with a mark where micro-batches were left out."""
        marks: _Marks = []
        launching: list[tuple[Mark, int, float]] = []
        for number, of in enumerate(self._running):
            if self._cut and number == self._cut and marks:
                marks.append((Mark.LEFT_OUT, -1, marks[-1][2]))
                launching.append((Mark.LEFT_OUT, -1, launching[-1][2]))
            marks += of.marks
            launching += of.launching
        return _Step(marks, launching)

    def _spare_events(self, marks: _Marks) -> None:
        self._spare += [event for kind, _, event in marks if isinstance(event, torch.cuda.Event) and kind is not Mark.LEFT_OUT]

    def clear(self) -> None:
        """Forget the finished steps, as after a change of plan."""
        for step in self._finished:
            self._spare_events(step.marks)
        self._finished.clear()

    def settle(self) -> None:
        """Wait until the device has reached every mark of the finished steps."""
        for step in self._finished:
            self._wait_for(step)

    def _wait_for(self, step: _Step) -> None:
        self.clock.wait_for(step.marks[-1][2])  # not for the device: copies and updates of the last step may still run

    def _is_through(self, step: _Step) -> bool:
        """Whether the device is through with a finished step."""
        return self.clock.is_reached(step.marks[-1][2])

    def _reached(self) -> list[_Step]:
        """The finished steps that the device is through with, oldest first.

        It waits for the first step only, so that there is one.
        """
        reached: list[_Step] = []
        for step in self._finished:
            if not self._is_through(step):
                if reached:
                    break
                self._wait_for(step)
            reached.append(step)
        return reached

    def finished(self, clock_us: ClockUs | None = None) -> list[list[tuple[Mark, int, float]]]:
        """The marks of the finished steps that the device is through with, oldest first.

        Their times are on the host's monotonic clock in microseconds. After `settle` these are all
        steps.

        clock_us   a reading of `clock` after that, where other moments are read with it too
        """
        reached = self._reached()
        clock_us = clock_us or self.clock.reading()
        return [[(kind, unit, clock_us(at)) for kind, unit, at in step.marks] for step in reached]

    def launched(self) -> list[list[tuple[Mark, int, float]]]:
        """When the launching thread came to the marks of the finished steps, on the same clock.

        The begin and end of `step()` are among them.
        """
        return [list(step.launching) for step in self._finished]

    @property
    def steps(self) -> int:
        """Number of finished steps at hand."""
        return len(self._finished)

    def last_stall_us(self) -> float | None:
        """How long the compute stream waited in the newest step that the device is through with.

        It asks the device and waits for nothing. None where there is no such step.
        """
        newest = next(filter(self._is_through, reversed(self._finished)), None)
        return None if newest is None else _between_us(newest.marks, _WAIT_BEGINS, _WAIT_ENDS)

    def median(self, units: int) -> UnitTimes:
        """Medians per unit over the finished steps that the device is through with.

        Raises ValueError without a finished step.
        """
        if not self._finished:
            raise ValueError("no finished step has been measured")
        reached = self._reached()
        steps = [_unit_times(step, units) for step in reached]
        apart = [elapsed_us(step.marks[-1][2], after.marks[0][2]) for step, after in itertools.pairwise(reached)]
        forward, backward, stall = (tuple(map(statistics.median, zip(*(getattr(s, name) for s in steps), strict=True)))
                                    for name in ("forward_us", "backward_us", "stall_us"))
        between_us, apart_us = statistics.median(s.between_us for s in steps), statistics.median(apart or [0.0])
        # as shares: the median of a part, summed over units first, may exceed the sum of medians
        held_us, fetch_stall_us = (sum(stall) * statistics.median(min(getattr(s, name) / (sum(s.stall_us) or 1.0), 1.0) for s in steps)
                                   for name in ("held_us", "fetch_stall_us"))
        return UnitTimes(forward, backward, stall, held_us, between_us, apart_us, fetch_stall_us)


def between(mark: Mark, next_mark: Mark, unit: int, next_unit: int) -> tuple[TaskKind, int] | None:
    """What happened between two marks in a row, and of which unit, by the table at the top.

    None where it was none of the three.
    """
    if mark is Mark.FORWARD_BEGIN and next_mark is Mark.WAIT_BEGIN:
        return TaskKind.FORWARD, next_unit
    if mark is Mark.WAIT_BEGIN:
        return TaskKind.WAIT, unit
    if mark is Mark.WAIT_END and next_mark in (Mark.WAIT_BEGIN, Mark.FORWARD_END):
        return TaskKind.FORWARD, unit
    if mark in (Mark.FORWARD_END, Mark.GRADS, Mark.BACKWARD_END) and next_mark is Mark.GRADS:
        return TaskKind.BACKWARD, next_unit
    if mark is Mark.GRADS and next_mark is Mark.BACKWARD_END:
        return TaskKind.BACKWARD, unit
    return None


def stretches(marks: Sequence[tuple[Mark, int, A]]) -> Iterator[tuple[TaskKind, int, A, A]]:
    """What happened when, of which unit: kind, unit, begin and end.

    Where the loop was held up meanwhile, it is a wait.
    """
    open_: tuple[Mark, int, A] | None = None
    pieces: list[tuple[A, A]] = []  # of the present stretch, without waits
    held: list[tuple[A, A]] = []  # where the loop was held up
    for mark, unit, at in marks:
        if mark is Mark.HELD_BEGIN and open_ is not None:
            pieces.append((open_[2] if not held else held[-1][1], at))
        elif mark is Mark.HELD_END and len(pieces) > len(held):
            held.append((pieces[-1][1], at))
        elif mark not in (Mark.HELD_BEGIN, Mark.HELD_END):
            found = None if open_ is None else between(open_[0], mark, open_[1], unit)
            if open_ is not None and found is not None:
                pieces.append((held[-1][1] if held else open_[2], at))
                yield from ((*found, begin, end) for begin, end in pieces)
                yield from ((TaskKind.WAIT, found[1], begin, end) for begin, end in held)
            open_, pieces, held = (mark, unit, at), [], []


def _unit_times(step: _Step, units: int) -> UnitTimes:
    us = {kind: [0.0] * units for kind in (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WAIT)}
    first, last = first_and_last(step.marks)
    for kind, unit, begin, end in itertools.chain(stretches(first), stretches(last)):
        us[kind][unit] += elapsed_us(begin, end)
    between_us = elapsed_us(first[-1][2], last[0][2]) if last else 0.0
    ends = ((Mark.HELD_BEGIN,), (Mark.HELD_END,))
    held_us = _between_us([mark for mark in first if mark[1] != FETCH], *ends)
    # the last micro-batch's backward fetches too
    fetch_stall_us = _between_us([mark for mark in (*first, *last) if mark[1] == FETCH], *ends)
    forward_us, backward_us, stall_us = map(tuple, us.values())
    return UnitTimes(forward_us, backward_us, stall_us, held_us, between_us, fetch_stall_us=fetch_stall_us)


def first_and_last(marks: Sequence[tuple[Mark, int, A]]) -> tuple[Sequence[tuple[Mark, int, A]], Sequence[tuple[Mark, int, A]]]:
    """The marks until every unit was used once; those from where every unit has a last gradient.

    All and none where these are not apart, as with one micro-batch.
    """
    waits, grads = ({unit for kind, unit, _ in marks if kind is of} for of in (Mark.WAIT_BEGIN, Mark.GRADS))
    first = _until(marks, Mark.WAIT_BEGIN, waits, (Mark.FORWARD_END,))
    last = len(marks) - _until(marks[-2::-1], Mark.GRADS, grads, (Mark.FORWARD_END, Mark.BACKWARD_END)) - 1
    return (marks[:first], marks[last:]) if first <= last else (marks, [])


def last_backward_begin_us(marks: Sequence[tuple[Mark, int, float]], otherwise_us: float) -> float:
    """When the step's last backward began, all of its graphs and what is outside of them."""
    _, last = first_and_last(marks)
    return last[0][2] if last else next((at for kind, _, at in marks if kind is Mark.FORWARD_END), otherwise_us)


def _until(marks: Sequence[tuple[Mark, int, A]], kind: Mark, units: set[int], ends: Sequence[Mark]) -> int:
    """The count of marks until all units have had one of this kind, and one of `ends` comes."""
    for count, (of, unit, _) in enumerate(marks, 1):
        if of is kind:
            units.discard(unit)
        elif not units and of in ends:
            return count
    return len(marks)


def _between_us(marks: Sequence[tuple[Mark, int, At]], begin: Sequence[Mark], end: Sequence[Mark]) -> float:
    """The sum of the stretches from marks of one kind to those of another."""
    begins, ends = ([at for mark, _, at in marks if mark in kinds] for kinds in (begin, end))
    return sum(map(elapsed_us, begins, ends))
