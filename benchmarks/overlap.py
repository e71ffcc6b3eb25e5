"""How much of the CPU's updating runs while the GPU computes, from a profiler trace of real steps.

The trace has the GPU's kernels and copies; the engine's own records of CPU updates are put beside
them on the same clock, and the whole is written as one Chrome trace.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from benchmarks.case import CannotRun
from benchmarks.idle import TRACED_STEPS
from benchmarks.trace import Event, busiest_stream, document, spans
from hytrain_fx.api import session_of
from hytrain_fx.explain.timeline.span import Interval, length, share_inside, union
from hytrain_fx.runtime.engine import Stage, TaskRecord


def traced(model: nn.Module, step: Callable[[], object], finish: Callable[[], None], path: Path) -> dict[str, float]:
    """Profile three steps, write one trace of all, and give how the updates overlap GPU kernels."""
    if not torch.cuda.is_available():
        raise CannotRun("--trace needs a GPU")
    session = session_of(model)
    engine = session.engine
    session.planning.recording = True  # else the planner turns recording off between its own measurements
    step()
    finish()
    engine.take_records()
    engine.record(True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        clock_offset_us = (time.time_ns() - time.monotonic_ns()) / 1e3
        for _ in range(TRACED_STEPS):
            step()
        finish()
    engine.record(False)
    session.planning.recording = False
    records = engine.take_records()
    profile.export_chrome_trace(str(path))
    trace = document(path)
    shift_us = clock_offset_us - trace.get("baseTimeNanoseconds", 0) / 1e3
    updates = _update_events(records, shift_us)
    kept = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy")] + updates
    path.write_text(json.dumps({**trace, "traceEvents": kept}))
    return overlap(kept)


def overlap(events: list[Event]) -> dict[str, float]:
    """Seconds of updates and of copies over the traced steps.

    For each, also the share that ran during the compute stream's kernels.
    """
    compute_stream = busiest_stream(e for e in events if e.get("cat") == "kernel")
    compute = union(spans((e for e in events if e.get("tid") == compute_stream), "kernel"))
    cpu = union(spans(events, "cpu_update"))
    d2h, h2d = (union(spans(events, "gpu_memcpy", direction)) for direction in ("DtoH", "HtoD"))
    return {
        "cpu_update_s": length(cpu) / 1e6,
        "cpu_update_during_kernels": share_during(cpu, compute),
        "d2h_s": length(d2h) / 1e6,
        "d2h_during_kernels": share_during(d2h, compute),
        "h2d_s": length(h2d) / 1e6,
        "h2d_during_kernels": share_during(h2d, compute),
        "compute_busy_s": length(compute) / 1e6,
        "span_s": (compute[-1][1] - compute[0][0]) / 1e6 if compute else 0.0,
    }


def share_during(inner: Iterable[Interval], outer: Iterable[Interval]) -> float:
    """Share 0..1 of `inner`'s time that lies inside `outer`; 0 where `inner` is empty."""
    return share_inside(inner, outer) or 0.0


def _update_events(records: Iterable[TaskRecord], shift_us: float) -> list[Event]:
    return [
        {"ph": "X", "cat": "cpu_update", "name": f"update row {r.row}", "pid": "hytrain_fx workers", "tid": r.worker,
         "ts": r.begin_us + shift_us, "dur": r.end_us - r.begin_us}
        for r in records if r.stage is Stage.CPU_UPDATE
    ]
