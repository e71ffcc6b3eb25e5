"""Timelines as Chrome trace events, which Perfetto and VizTracer's viewer open, and back.

The format is "Trace Event Format" (Google): complete events `ph: X` with `ts` and `dur` in
microseconds, metadata `ph: M`. Two events of one thread may not overlap, so a lane on which two
things ran at once takes two threads. Times are whole nanoseconds, as viewers keep them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from hytrain_fx.errors import ConfigError
from hytrain_fx.explain.timeline.lanes import Lanes
from hytrain_fx.explain.timeline.launching import StepLaunch
from hytrain_fx.explain.timeline.span import Kind, LaunchKind, Span, tracks
from hytrain_fx.ir.task_graph import TaskKind

Event = dict[str, Any]


def trace_json(timelines: Sequence[Lanes]) -> str:
    """Trace events as JSON text: one process for each timeline, one thread for each lane."""
    threads = itertools.count(1)  # no number twice: no viewer may take two threads for one
    events = [event for pid, timeline in enumerate(timelines, start=1) for event in _events(timeline, pid, threads)]
    told = [{"source": t.source, "unit_names": t.unit_names, "launches": [asdict(launch) for launch in t.launches]} for t in timelines]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"hytrain_fx": told}})


def read_parts(text: str) -> list[tuple[list[Span], list[str], str, list[StepLaunch]]]:
    """Spans, unit names, source and launches of each timeline in `trace_json`'s text.

    Raises ConfigError for any other text.
    """
    try:
        raw = json.loads(text)
        told, events = raw["otherData"]["hytrain_fx"], raw["traceEvents"]
        lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        return [(sorted(_spans(events, lanes, pid), key=lambda span: span.begin_us), part["unit_names"], part["source"],
                 [_launch(values) for values in part["launches"]]) for pid, part in enumerate(told, start=1)]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"this is no trace that Timeline.save() wrote: {type(error).__name__} {error}") from error


def _events(timeline: Lanes, pid: int, numbers: Iterator[int]) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": f"hytrain_fx, {timeline.source}"}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    threads = [(lane, track) for lane, spans in timeline.lanes.items() for track in tracks(spans)]
    for (lane, track), tid in zip(threads, numbers):  # noqa: B905 - the second never ends
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        for span in track:
            yield {"ph": "X", "pid": pid, "tid": tid, "ts": round(span.begin_us, 3), "dur": _length_us(span), "name": span.label,
                   "cat": str(span.kind), "args": _arguments(timeline, span)}


def _length_us(span: Span) -> float:
    """Between the rounded ends: neighbours that touch stay so."""
    return round(round(span.end_us, 3) - round(span.begin_us, 3), 3)


def _arguments(timeline: Lanes, span: Span) -> dict[str, Any]:
    unit = {"unit": timeline.unit_names[span.unit], "number": span.unit} if span.unit >= 0 else {}
    return {"task": str(span.kind)} | unit | ({"bytes": span.nbytes} if span.nbytes else {})


def _spans(events: Sequence[Event], lanes: dict[tuple[int, int], str], pid: int) -> Iterator[Span]:
    for e in events:
        if e["ph"] == "X" and e["pid"] == pid:
            of, end_us = e["args"], round(e["ts"] + e["dur"], 3)
            yield Span(lanes[pid, e["tid"]], _kind(of["task"]), of.get("number", -1), e["ts"], end_us, of.get("bytes", 0))


def _launch(values: dict[str, Any]) -> StepLaunch:
    kind = values["longest_kind"]
    return StepLaunch(**{**values, "longest_kind": None if kind is None else LaunchKind(kind)})


def _kind(text: str) -> Kind:
    return LaunchKind(text) if text in set(LaunchKind) else TaskKind(text)
