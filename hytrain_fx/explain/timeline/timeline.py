"""What ran when: a lane for the launching thread, the device, each copy direction and each CPU worker; as text, Chrome trace or picture.

    launching      |b3|b2|b1|b0|s|f0|......f1|.......
    device         |b3----|b2----|b1----|b0----|f0--|f1--|f2--|f3--|
    D2H                   |g3|   |g2|
    CPU 0                     |u3----|u2----|
    H2D                               |w3|   |w2|

Measured timelines come from `hytrain_fx.record`, predicted ones from a `Schedule`; both are `Timeline` values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hytrain_fx.errors import ConfigError
from hytrain_fx.explain.timeline.launching import StepLaunch
from hytrain_fx.explain.timeline.picture import write_png
from hytrain_fx.explain.timeline.span import Interval, Kind, Span, lane_order, share_inside
from hytrain_fx.explain.timeline.text import timelines_text
from hytrain_fx.explain.timeline.trace_file import read_parts, trace_json
from hytrain_fx.ir.schedule import Schedule
from hytrain_fx.ir.task_graph import Resource, TaskKind
from hytrain_fx.planning.marks import Mark, stretches

if TYPE_CHECKING:
    from hytrain_fx.runtime.engine import TaskRecord

from hytrain_fx.errors import UnsupportedError

_LANES = {Resource.GPU: "device", Resource.D2H: "D2H", Resource.CPU: "CPU", Resource.H2D: "H2D"}  # of predicted tasks
_STAGES = {name: TaskKind[name] for name in ("D2H", "CPU_UPDATE", "GPU_UPDATE", "H2D", "STREAM_IN", "STREAM_OUT")}


@dataclass(frozen=True)
class Timeline:
    """Spans in order of begin, with the names of the units; times start at 0.

    launches    what the launching thread did in each step; measured only
    """

    spans: tuple[Span, ...]
    unit_names: tuple[str, ...]
    source: Literal["measured", "predicted"]
    launches: tuple[StepLaunch, ...] = ()

    @property
    def lanes(self) -> dict[str, tuple[Span, ...]]:
        """Spans by lane: the launching thread, the device, D2H, CPU workers, H2D."""
        order = sorted({span.lane for span in self.spans}, key=lane_order)
        return {lane: tuple(span for span in self.spans if span.lane == lane) for lane in order}

    @property
    def length_us(self) -> float:
        """From the first begin to the last end."""
        return max((span.end_us for span in self.spans), default=0.0)

    def busy_us(self, *kinds: Kind) -> float:
        """Time spent on tasks of these kinds, summed over lanes."""
        return sum(span.end_us - span.begin_us for span in self.spans if span.kind in kinds)

    @property
    def overlap_share(self) -> float | None:
        """Share 0..1 of the CPU updates' time that ran while the device computed a forward or backward; None without CPU updates."""
        updates = [(s.begin_us, s.end_us) for s in self.spans if s.kind is TaskKind.CPU_UPDATE]
        computing = [(s.begin_us, s.end_us) for s in self.spans if s.kind in (TaskKind.FORWARD, TaskKind.BACKWARD)]
        return share_inside(updates, computing)

    @property
    def step_ended_at(self) -> float | None:
        """Share of the device's backward that was done when `optimizer.step()` returned, the largest of all steps.

        Below 0: it had not begun; above 1: it was over; None without a recorded step.
        """
        return max((launch.ended_at for launch in self.launches), default=None)

    @property
    def longest_launch_us(self) -> float | None:
        """No block of the launching thread from the forward's last gate to `optimizer.step()` was longer; None without a step."""
        return max((launch.longest_us for launch in self.launches), default=None)

    def last_step(self) -> Timeline:
        """From the begin of the device's last backward but one to that of its last: what a predicted timeline shows.

        All of it where fewer than two steps were recorded.
        """
        if len(self.launches) < 2:
            return self
        before, after = self.launches[-2:]
        begin_us, end_us = before.backward_begin_us, after.backward_begin_us
        cut = (replace(s, begin_us=max(s.begin_us, begin_us), end_us=min(s.end_us, end_us)) for s in self.spans)
        kept = tuple(span.moved(-begin_us) for span in cut if span.end_us > span.begin_us)
        return Timeline(kept, self.unit_names, self.source, (before.moved(-begin_us),))

    def moved(self, by_us: float) -> Timeline:
        """The same that much later."""
        spans, launches = (span.moved(by_us) for span in self.spans), (launch.moved(by_us) for launch in self.launches)
        return replace(self, spans=tuple(spans), launches=tuple(launches))

    def text(self, width: int = 120, *others: Timeline) -> str:
        """Lanes of `width` characters each; further timelines stand below this one, on its scale."""
        return timelines_text((self, *others), width)

    def __str__(self) -> str:
        return self.text()

    def to_chrome_json(self, *others: Timeline) -> str:
        """Trace events for Perfetto or VizTracer's viewer; each further timeline is a process of its own below this one."""
        return trace_json((self, *others))

    def save(self, path: str | Path, *others: Timeline) -> Path:
        """Write a Chrome trace (`.json`) or a picture (`.png`; needs matplotlib), further timelines below.

        Raises ConfigError for another suffix.
        """
        path = Path(path)
        if path.suffix == ".json":
            path.write_text(self.to_chrome_json(*others))
        elif path.suffix == ".png":
            write_png((self, *others), path)
        else:
            raise ConfigError(f"found the suffix {path.suffix!r} of {path}, expected .json (Chrome trace) or .png (picture)")
        return path


def from_records(
    records: Iterable[TaskRecord], marked: Iterable[Span], unit_of: Mapping[int, int], unit_names: Sequence[str], *, begin_us: float = 0.0,
    launches: Iterable[StepLaunch] = (),
) -> Timeline:
    """The measured timeline: the engine's records, and the spans between marks, on the engine's clock, from `begin_us` on.

    unit_of    unit of each row of the engine; records of other rows (probes) are left out
    """
    spans = [_span_of(record, unit_of) for record in records if record.stage.name in _STAGES and record.row in unit_of]
    kept = [span for span in (*marked, *spans) if span.begin_us >= begin_us]
    first_us = min((span.begin_us for span in kept), default=0.0)
    inside = [launch.moved(-first_us) for launch in launches if launch.step_begin_us >= begin_us]
    moved = sorted((span.moved(-first_us) for span in kept), key=lambda span: span.begin_us)
    return Timeline(tuple(moved), tuple(unit_names), "measured", tuple(inside))


def read_trace(path: str | Path) -> list[Timeline]:
    """The timelines that `Timeline.save` or `Recording.save` wrote as a Chrome trace. Raises ConfigError for another file."""
    return [Timeline(tuple(spans), tuple(names), "measured" if source == "measured" else "predicted", tuple(launches))
            for spans, names, source, launches in read_parts(Path(path).read_text())]


def device_spans(steps: Iterable[Sequence[tuple[Mark, int, float]]]) -> list[Span]:
    """What the device did between the marks of each step (`StepMarks.finished`), by the rules of `cost_model.measure`."""
    return [Span("device", kind, unit, begin_us, end_us) for marks in steps for kind, unit, begin_us, end_us in stretches(marks)]


def from_schedule(schedule: Schedule, unit_names: Sequence[str]) -> Timeline:
    """The predicted timeline of one steady step: a backward, then the next forward. Waits are the gaps of the device."""
    spans = [Span(_LANES[i.resource], i.task.kind, i.task.unit, i.start_us, i.end_us) for i in schedule.intervals]
    return Timeline(tuple(sorted(spans, key=lambda span: span.begin_us)), tuple(unit_names), "predicted")


def overlap_share(records: Iterable[TaskRecord], device_intervals: Iterable[Interval]) -> float | None:
    """Share 0..1 of the CPU updates' time in which the device was busy; None when no CPU update was recorded.

    device_intervals    (begin_us, end_us) on the records' clock; they may overlap and come in any order
    """
    return share_inside([(r.begin_us, r.end_us) for r in records if r.stage.name == "CPU_UPDATE"], device_intervals)


def _span_of(record: TaskRecord, unit_of: Mapping[int, int]) -> Span:
    kind = _STAGES[record.stage.name]
    lanes: Mapping[TaskKind, str] = {
        TaskKind.CPU_UPDATE: f"CPU {record.worker}", TaskKind.GPU_UPDATE: "device updates",
        TaskKind.STREAM_IN: "H2D states", TaskKind.STREAM_OUT: "D2H states",
    }
    return Span(lanes.get(kind, record.stage.name), kind, unit_of[record.row], record.begin_us, record.end_us)


# ---- What the steps inside a `hytrain_fx.record` block did, and what was predicted for one of them ----


class Recording:
    """The steps inside a `record` block. `predicted` is the schedule of the plan in force, None where none is.

    `print` it for the last whole step with the predicted one under it, on one scale; `save` it; or take `timeline`, which has all steps.
    """

    def __init__(self, predicted: Timeline | None) -> None:
        self.predicted = predicted
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """What ran when, in all steps. Raises UnsupportedError while the block has not ended."""
        if self._timeline is None:
            raise UnsupportedError("the record block has not ended (or ended with an error): take the timeline after it")
        return self._timeline

    def ended(self, timeline: Timeline) -> None:
        """The block has ended, and this is what was recorded."""
        self._timeline = timeline

    def text(self, width: int = 120) -> str:
        """The last whole step, the predicted one under it, lanes of `width` characters. Raises UnsupportedError as `timeline` does."""
        return self.timeline.last_step().text(width, *self._predicted())

    def __str__(self) -> str:
        return self.text()

    def save(self, path: str | Path) -> Path:
        """Write all steps as a Chrome trace (`.json`), or the last whole one as a picture (`.png`; needs matplotlib).

        The predicted step stands below. Raises ConfigError for another suffix, UnsupportedError as `timeline` does.
        """
        if Path(path).suffix != ".json":
            return self.timeline.last_step().save(path, *self._predicted())
        launches = self.timeline.launches
        begin_us = launches[-2].backward_begin_us if len(launches) > 1 else 0.0
        return self.timeline.save(path, *(predicted.moved(begin_us) for predicted in self._predicted()))

    def _predicted(self) -> tuple[Timeline, ...]:
        return (self.predicted,) if self.predicted else ()
