"""What ran when, as text, Chrome trace or picture.

A lane for the launching thread, the device, each copy direction and each CPU worker; with several
ranks also for what goes from rank to rank, and where weights rest on the host or in shards for
their coming.

    launching      |b3|b2|b1|b0|s|f0|......f1|.......
    device         |b3----|b2----|b1----|b0----|f0--|f1--|f2--|f3--|
    D2H                   |g3|   |g2|
    CPU 0                     |u3----|u2----|
    H2D                               |w3|   |w2|

Measured timelines come from `hytrain_fx.record`, predicted ones from a `Schedule`; both are a
`Timeline`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hytrain_fx.errors import ConfigError
from hytrain_fx.explain.timeline.lanes import Lanes
from hytrain_fx.explain.timeline.launching import StepLaunch
from hytrain_fx.explain.timeline.picture import write_png
from hytrain_fx.explain.timeline.span import COLLECTIVES, FETCHED, Span
from hytrain_fx.explain.timeline.text import timelines_text
from hytrain_fx.explain.timeline.trace_file import read_parts, trace_json
from hytrain_fx.ir.schedule import Schedule
from hytrain_fx.ir.task_graph import ARRIVALS, Resource, TaskKind
from hytrain_fx.planning.marks import Mark, stretches
from hytrain_fx.runtime.device_clock import ClockUs
from hytrain_fx.runtime.engine import TaskRecord
from hytrain_fx.runtime.lane_times import Timed

# of predicted tasks
_LANES = {Resource.GPU: "device", Resource.D2H: "D2H", Resource.CPU: "CPU", Resource.H2D: "H2D", Resource.COLLECTIVES: COLLECTIVES}
_STAGES = {name: TaskKind[name] for name in ("D2H", "CPU_UPDATE", "GPU_UPDATE", "H2D", "STREAM_IN", "STREAM_OUT")}


@dataclass(frozen=True)
class Timeline(Lanes):
    """Lanes as text, Chrome trace or picture."""

    def text(self, width: int = 120, *others: Lanes) -> str:
        """Lanes of `width` characters each.

        Further timelines stand below this one, on its scale.
        """
        return timelines_text((self, *others), width)

    def __str__(self) -> str:
        return self.text()

    def to_chrome_json(self, *others: Lanes) -> str:
        """Trace events for Perfetto or VizTracer's viewer.

        Each further timeline is its own process, below this one.
        """
        return trace_json((self, *others))

    def save(self, path: str | Path, *others: Lanes) -> Path:
        """Write a Chrome trace (`.json`) or a picture (`.png`), further timelines below.

        A picture needs matplotlib.

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
    """The measured timeline, from `begin_us` on, on the engine's clock.

    It has the engine's records, and the spans between marks.

    unit_of    unit of each row of the engine; records of other rows (probes) are left out
    """
    spans = [_span_of(record, unit_of) for record in records if record.stage.name in _STAGES and record.row in unit_of]
    kept = [span for span in (*marked, *spans) if span.begin_us >= begin_us]
    first_us = min((span.begin_us for span in kept), default=0.0)
    inside = [launch.moved(-first_us) for launch in launches if launch.step_begin_us >= begin_us]
    moved = sorted((span.moved(-first_us) for span in kept), key=lambda span: span.begin_us)
    return Timeline(tuple(moved), tuple(unit_names), "measured", tuple(inside), first_us)


def read_trace(path: str | Path) -> list[Timeline]:
    """The timelines that `Timeline.save` or `Recording.save` wrote as a Chrome trace.

    Raises ConfigError for another file.
    """
    return [Timeline(tuple(spans), tuple(names), "measured" if source == "measured" else "predicted", tuple(launches))
            for spans, names, source, launches in read_parts(Path(path).read_text())]


def device_spans(steps: Iterable[Sequence[tuple[Mark, int, float]]]) -> list[Span]:
    """What the device did between the marks of each step (`StepMarks.finished`).

    The rules are in `planning.marks`.
    """
    return [Span("device", kind, unit, begin_us, end_us) for marks in steps for kind, unit, begin_us, end_us in stretches(marks)]


def lane_spans(timed: Iterable[Timed], clock_us: ClockUs, unit_of: Sequence[int]) -> list[Span]:
    """What went from rank to rank, and what came to slots (`LaneTimes.take`).

    unit_of    unit of each parameter
    """
    return [Span(FETCHED if of.kind in ARRIVALS else COLLECTIVES, of.kind, unit_of[of.row], clock_us(of.begin), clock_us(of.end), of.nbytes)
            for of in timed]


def from_schedule(schedule: Schedule, unit_names: Sequence[str]) -> Timeline:
    """The predicted timeline of one steady step: a backward, then the next forward.

    Waits are the gaps of the device.
    """
    spans = [Span(FETCHED if i.task.kind in ARRIVALS else _LANES[i.resource], i.task.kind, i.task.unit, i.start_us, i.end_us)
             for i in schedule.intervals]
    return Timeline(tuple(sorted(spans, key=lambda span: span.begin_us)), tuple(unit_names), "predicted")


def _span_of(record: TaskRecord, unit_of: Mapping[int, int]) -> Span:
    kind = _STAGES[record.stage.name]
    lanes: Mapping[TaskKind, str] = {
        TaskKind.CPU_UPDATE: f"CPU {record.worker}", TaskKind.GPU_UPDATE: "device updates",
        TaskKind.STREAM_IN: "H2D states", TaskKind.STREAM_OUT: "D2H states",
    }
    return Span(lanes.get(kind, record.stage.name), kind, unit_of[record.row], record.begin_us, record.end_us)
