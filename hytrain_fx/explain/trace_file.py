"""Timelines as files: Chrome trace events (Perfetto opens them) and a picture.

The trace format is that of "Trace Event Format" (Google): complete events `ph: X` with `ts` and `dur` in microseconds, metadata `ph: M`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.task_graph import TaskKind

if TYPE_CHECKING:
    from hytrain_fx.explain.timeline import Timeline

_COLOURS = {
    TaskKind.FORWARD: "#4c78a8", TaskKind.BACKWARD: "#9ecae9", TaskKind.WAIT: "#e45756", TaskKind.D2H: "#f2cf5b",
    TaskKind.CPU_UPDATE: "#54a24b", TaskKind.GPU_UPDATE: "#88d27a", TaskKind.H2D: "#b279a2",
    TaskKind.STREAM_IN: "#ff9da6", TaskKind.STREAM_OUT: "#d6a5c9",
}


def trace_json(timelines: Sequence[Timeline]) -> str:
    """Trace events as JSON text: one process for each timeline, one thread for each lane."""
    events = [event for pid, timeline in enumerate(timelines, start=1) for event in _events(timeline, pid)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def write_png(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw the timelines below one another on one scale. Raises UnsupportedError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(f"a picture needs matplotlib: {error}; install it, or save a .json trace") from error
    figure = Figure(figsize=(14, 1 + sum(0.4 * len(t.lanes) + 0.8 for t in timelines)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)
    for axis, timeline in zip(axes[:, 0], timelines, strict=True):
        _draw(axis, timeline)
    axes[-1, 0].set_xlabel("ms")
    figure.savefig(path, format="png")


def _events(timeline: Timeline, pid: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"hytrain_fx, {timeline.source}"}}
    for tid, (lane, spans) in enumerate(timeline.lanes.items(), start=1):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        for span in spans:
            yield {
                "ph": "X", "pid": pid, "tid": tid, "ts": span.begin_us, "dur": span.end_us - span.begin_us,
                "name": span.label, "cat": str(span.kind), "args": {"unit": timeline.unit_names[span.unit], "task": str(span.kind)},
            }


def _draw(axis: Any, timeline: Timeline) -> None:
    lanes = timeline.lanes
    for y, spans in enumerate(lanes.values()):
        bars = [(span.begin_us / 1e3, (span.end_us - span.begin_us) / 1e3) for span in spans]
        axis.broken_barh(bars, (y - 0.4, 0.8), facecolors=[_COLOURS[span.kind] for span in spans], edgecolor="white", linewidth=0.3)
        for span in spans:
            if span.end_us - span.begin_us > timeline.length_us / 60:
                axis.text((span.begin_us + span.end_us) / 2e3, y, span.label, ha="center", va="center", fontsize=7)
    axis.set_yticks(range(len(lanes)), list(lanes))
    axis.invert_yaxis()
    axis.set_title(timeline.source, loc="left", fontsize=9)
