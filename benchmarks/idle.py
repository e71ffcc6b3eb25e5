"""Share of a step in which the GPU runs no kernel, from a profiler trace of three steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.case import CannotRun
from benchmarks.trace import events, spans
from hytrain_fx.explain.timeline.span import length, union

TRACED_STEPS = 3


def kernel_time(step: Callable[[], object], finish: Callable[[], None]) -> dict[str, float]:
    """Seconds of a step in which some stream runs a kernel. Raises CannotRun without a GPU.

    Copies do not count. The wall time of a traced step is given too: the profiler slows launching
    down, so idle shares are of untraced steps.
    """
    if not torch.cuda.is_available():
        raise CannotRun("the GPU's idle time needs a GPU: leave --idle out")
    finish()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        begin_s = time.perf_counter()
        for _ in range(TRACED_STEPS):
            step()
        finish()
        traced_s = time.perf_counter() - begin_s
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        found = events(path)
    busy_us = length(union(spans(found, "kernel")))
    return {"kernel_busy_s": round(busy_us / 1e6 / TRACED_STEPS, 5), "traced_step_s": round(traced_s / TRACED_STEPS, 5)}


def idle_share(kernel_busy_s: float, step_s: float) -> float:
    """1 - kernel time over step time.

    It is 0 where kernels ran longer under the profiler than the step took without it.
    """
    return round(max(0.0, 1.0 - kernel_busy_s / step_s), 4)
