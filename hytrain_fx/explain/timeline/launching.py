"""What the launching thread did.

Whether it reaches `step()` while the device is early in the backward, and what held it up before.

    launching   |f0|.f1|..f2|b2|b1|b0|s|                  blocked in gates of the forward only
    device           |f0--|f1--|f2--|b2----|b1----|b0----|
                                     ^ step() ended

A mark costs one reading of the clock, so calls of the driver and of the engine have no marks.
Between two marks the thread launches or is blocked: no block was longer than the longest stretch
between two marks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hytrain_fx.explain.timeline.span import LAUNCHING, WORDS, LaunchKind, Span
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.task_graph import TaskKind
from hytrain_fx.planning.marks import Mark, between, last_backward_begin_us, stretches

Marks = Sequence[tuple[Mark, int, float]]
_KINDS = {TaskKind.FORWARD: LaunchKind.FORWARD, TaskKind.WAIT: LaunchKind.GATE, TaskKind.BACKWARD: LaunchKind.BACKWARD}


@dataclass(frozen=True, slots=True)
class StepLaunch:
    """The call of `optimizer.step()` in one step, next to the device's last backward of it.

    All is on one clock, in microseconds.

    longest_us       the longest stretch between two marks of the launching thread from the
                     forward's last gate to the call
    longest_kind     what was launched in it, None = the loop's own code before the call
    longest_unit     of which unit, -1 = of none
    """

    backward_begin_us: float
    backward_end_us: float
    step_begin_us: float
    step_end_us: float
    longest_us: float
    longest_kind: LaunchKind | None
    longest_unit: int

    @property
    def ended_at(self) -> float:
        """Share of the device's backward that was done when `step()` returned.

        Below 0: it had not begun; above 1: it was over.
        """
        return (self.step_end_us - self.backward_begin_us) / max(self.backward_end_us - self.backward_begin_us, 1e-9)

    def moved(self, by_us: float) -> StepLaunch:
        """The same step, that much later."""
        return replace(self, backward_begin_us=self.backward_begin_us + by_us, backward_end_us=self.backward_end_us + by_us,
                       step_begin_us=self.step_begin_us + by_us, step_end_us=self.step_end_us + by_us)


def launch_spans(steps: Iterable[Marks]) -> list[Span]:
    """The lane of the launching thread, from the marks of each step (`StepMarks.launched`)."""
    return [span for marks in steps for span in _spans(marks)]


def step_launches(device: Iterable[Marks], launched: Iterable[Marks]) -> tuple[StepLaunch, ...]:
    """The figures of each step that has a backward and a call of `step()`.

    They come from `StepMarks.finished()` and `StepMarks.launched()`.
    """
    found = (_launch(on_device, marks) for on_device, marks in zip(device, launched, strict=True))
    return tuple(launch for launch in found if launch is not None)


def launches_text(launches: Sequence[StepLaunch], unit_names: Sequence[str]) -> list[str]:
    """The worst of the steps in words; no line without a step."""
    if not launches:
        return []
    latest = max(launches, key=lambda launch: launch.ended_at)
    longest = max(launches, key=lambda launch: launch.longest_us)
    of = f" (the latest of {len(launches)} steps)" if len(launches) > 1 else ""
    return [
        f"optimizer.step() returned {_moment(latest)}{of}",
        f"from the forward's last gate to step() no block of the launching thread was longer than {time_text(longest.longest_us)} "
        f"({_what(longest, unit_names)})",
    ]


def _moment(launch: StepLaunch) -> str:
    share = launch.ended_at
    if share < 0:
        return f"{time_text(launch.backward_begin_us - launch.step_end_us)} before the device's backward began"
    if share > 1:
        return f"{time_text(launch.step_end_us - launch.backward_end_us)} after the device's backward ended"
    return f"when {share:.0%} of the device's backward was done"


def _what(launch: StepLaunch, unit_names: Sequence[str]) -> str:
    if launch.longest_kind is None:
        return "the loop's own code before step()"
    if launch.longest_unit < 0:
        return "waiting in this library for weights that code outside the graphs may read"
    return f"launching the {WORDS[launch.longest_kind]} of {unit_names[launch.longest_unit] or '(model)'}"


def _spans(marks: Marks) -> Iterator[Span]:
    for kind, unit, begin_us, end_us in stretches(marks):
        yield Span(LAUNCHING, _KINDS[kind], unit, begin_us, end_us)
    for (mark, _, begin_us), (next_mark, _, end_us) in itertools.pairwise(marks):
        if mark is Mark.STEP_BEGIN and next_mark is Mark.STEP_END:
            yield Span(LAUNCHING, LaunchKind.STEP, -1, begin_us, end_us)


def _between(mark: Mark, next_mark: Mark, unit: int, next_unit: int) -> tuple[LaunchKind, int] | None:
    """As on the device, except that a wait is a gate: it ends when the weight is on its way."""
    if mark is Mark.HELD_BEGIN and next_mark is Mark.HELD_END:
        return LaunchKind.GATE, -1
    found = between(mark, next_mark, unit, next_unit)
    return None if found is None else (_KINDS[found[0]], found[1])


def _launch(device: Marks, launched: Marks) -> StepLaunch | None:
    ends = [at for mark, _, at in device if mark is Mark.BACKWARD_END]
    calls = [i for i in range(len(launched) - 1) if (launched[i][0], launched[i + 1][0]) == (Mark.STEP_BEGIN, Mark.STEP_END)]
    if not ends or not calls:
        return None
    begin_us, end_us = last_backward_begin_us(device, device[0][2]), ends[-1]
    call = calls[-1]
    gate = next((i for i in range(call, -1, -1) if launched[i][0] is Mark.WAIT_END), 0)
    longest = max(range(gate, call), key=lambda i: launched[i + 1][2] - launched[i][2])
    (mark, unit, at), (next_mark, next_unit, next_at) = launched[longest], launched[longest + 1]
    kind, of = _between(mark, next_mark, unit, next_unit) or (None, -1)
    return StepLaunch(begin_us, end_us, launched[call][2], launched[call + 1][2], next_at - at, kind, of)
