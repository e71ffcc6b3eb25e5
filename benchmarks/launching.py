"""What holds up the threads that launch: how long they take, what a call costs, where they ran.

On the way of a step: the thread of the loop ("main"), and those of autograd that run backwards on
a GPU. A thread that the system takes off its core, or moves to another, finds none of its data in
the core's caches. So do calls of code that last ran a step ago, with gigabytes of updates between.
"""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.idle import TRACED_STEPS

STEPS = 30
_AUTOGRAD = "pt_autograd"  # the name that torch gives them
_LAUNCHES = re.compile(r"cu(da)?LaunchKernel\w*|aten::(mm|addmm|convolution_backward)")
_SWITCHES = {"voluntary_ctxt_switches": "gave_up_core", "nonvoluntary_ctxt_switches": "taken_off_core", "se.nr_migrations": "changed_core"}
_COUNTED = re.compile(r"^([\w.]+)\s*:\s*(\d+)$", re.MULTILINE)


def launching(step: Callable[[], object], finish: Callable[[], None], launching_s: Callable[[], float | None]) -> dict[str, Any]:
    """Figures of steps that follow one another, and of steps that begin once all is done.

    launching_s    how long the host was in the newest forward and backward; None: not known

    Milliseconds a step, the median; by thread, how often in a step it left its core, by itself or
    not, and came to another one (where Linux tells); by call, how many in a step and microseconds
    each, under the profiler, which slows all of them.
    """
    finish()
    return {"in_a_row": _timed(step, lambda: None, launching_s), "each_after_a_drain": _timed(step, finish, launching_s),
            "calls": _calls(step, finish)}


def _timed(step: Callable[[], object], before: Callable[[], None], launching_s: Callable[[], float | None]) -> dict[str, Any]:
    counted, took_s = switches(), []
    for _ in range(STEPS):
        before()
        step()
        took_s.append(launching_s())
    known = [s for s in took_s if s is not None]
    left = switches()
    left.subtract(counted)
    by_thread: dict[str, dict[str, float]] = {}
    for (thread, what), count in sorted(left.items()):
        by_thread.setdefault(thread, {})[what] = round(count / STEPS, 2)
    return {"launching_ms": round(1e3 * statistics.median(known), 3) if known else None, "threads": by_thread}


def switches(of: Path = Path("/proc/self/task")) -> Counter[tuple[str, str]]:
    """How often threads that launch have left their cores: by thread's name and what happened.

    Those of autograd are summed. Nothing where the system has no such folder.
    """
    found: Counter[tuple[str, str]] = Counter()
    for folder in of.glob("*"):
        try:
            name = "main" if int(folder.name) == os.getpid() else (folder / "comm").read_text().strip()
            if name != "main" and not name.startswith(_AUTOGRAD):
                continue
            text = "\n".join((folder / file).read_text() for file in ("status", "sched") if (folder / file).exists())
        except OSError:  # the thread has ended
            continue
        thread = "main" if name == "main" else "autograd"
        found.update({(thread, _SWITCHES[what]): int(count) for what, count in _COUNTED.findall(text) if what in _SWITCHES})
    return found


def _calls(step: Callable[[], object], finish: Callable[[], None]) -> dict[str, dict[str, float]]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(TRACED_STEPS):
            finish()
            step()
        finish()
    return dict(_launches(profile))


def _launches(profile: torch.profiler.profile) -> Iterator[tuple[str, dict[str, float]]]:
    for event in sorted(profile.key_averages(), key=lambda event: str(event.key)):
        if _LAUNCHES.fullmatch(event.key) or event.key.startswith("hytrain_fx::"):
            yield event.key, {"a_step": round(event.count / TRACED_STEPS, 1), "us_each": round(event.cpu_time_total / event.count, 2)}
