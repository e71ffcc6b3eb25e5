"""How much of the CPU's updating runs while the GPU computes, from a profiler trace of real steps.

The trace has the GPU's kernels and copies; the engine's own records of CPU updates are put beside them on the same clock,
and the whole is written as one Chrome trace.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Interval = tuple[float, float]


def traced(model: nn.Module, step: Callable[[], object], finish: Callable[[], None], path: str) -> dict[str, float]:
    """Profile three steps, write the trace of all, and give the overlap of the updates with the GPU's kernels."""
    from hytrain_fx.api import session_of
    from hytrain_fx.runtime.engine import Stage

    session = session_of(model)
    engine = session.engine
    session.planning.recording = True  # else the planner turns recording off between its own measurements
    step()
    finish()
    engine.take_records()
    engine.record(True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        clock_offset_us = (time.time_ns() - time.monotonic_ns()) / 1e3
        for _ in range(3):
            step()
        finish()
    engine.record(False)
    session.planning.recording = False
    records = engine.take_records()
    profile.export_chrome_trace(path)
    with open(path) as file:
        trace = json.load(file)
    base_us = trace.get("baseTimeNanoseconds", 0) / 1e3
    kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
    compute_stream = _busiest_stream(kernels)
    compute = _union([(e["ts"], e["ts"] + e["dur"]) for e in kernels if e["tid"] == compute_stream])
    copies = [e for e in trace["traceEvents"] if e.get("cat") == "gpu_memcpy"]
    d2h = _union([(e["ts"], e["ts"] + e["dur"]) for e in copies if "DtoH" in e["name"]])
    h2d = _union([(e["ts"], e["ts"] + e["dur"]) for e in copies if "HtoD" in e["name"]])
    shift = clock_offset_us - base_us
    updates = [r for r in records if r.stage is Stage.CPU_UPDATE]
    cpu = _union([(r.begin_us + shift, r.end_us + shift) for r in updates])
    trace["traceEvents"] += [
        {"ph": "X", "cat": "cpu_update", "name": f"update row {r.row}", "pid": "hytrain_fx workers", "tid": r.worker,
             "ts": r.begin_us + shift, "dur": r.end_us - r.begin_us}
        for r in updates
    ]
    with open(path, "w") as file:
        kept = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "cpu_update")]
        json.dump({**trace, "traceEvents": kept}, file)
    return {
        "cpu_update_s": _length(cpu) / 1e6,
        "cpu_update_during_kernels": _share(cpu, compute),
        "d2h_s": _length(d2h) / 1e6,
        "d2h_during_kernels": _share(d2h, compute),
        "h2d_s": _length(h2d) / 1e6,
        "h2d_during_kernels": _share(h2d, compute),
        "compute_busy_s": _length(compute) / 1e6,
        "span_s": (compute[-1][1] - compute[0][0]) / 1e6 if compute else 0.0,
    }


def _busiest_stream(kernels: Sequence[dict[str, Any]]) -> object:
    spent: dict[object, float] = {}
    for event in kernels:
        spent[event["tid"]] = spent.get(event["tid"], 0.0) + event["dur"]
    return max(spent, key=lambda tid: spent[tid]) if spent else None


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _share(inner: Sequence[Interval], outer: Sequence[Interval]) -> float:
    """Share of `inner`'s time that lies inside `outer`; both sorted and disjoint."""
    covered, at = 0.0, 0
    for begin, end in inner:
        while at < len(outer) and outer[at][1] <= begin:
            at += 1
        probe = at
        while probe < len(outer) and outer[probe][0] < end:
            covered += min(end, outer[probe][1]) - max(begin, outer[probe][0])
            probe += 1
    total = _length(inner)
    return covered / total if total else 0.0
