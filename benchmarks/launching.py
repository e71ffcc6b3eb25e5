"""What holds up the threads that launch: how long they take, what a call costs, where they ran.

On the way of a step: the thread of the loop ("main"), and those of autograd that run backwards on
a GPU. A thread that the system takes off its core, or moves to another, finds none of its data in
the core's caches. So do calls of code that last ran a step ago, with gigabytes of updates between.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.idle import TRACED_STEPS
from hytrain_fx.api import session_of
from hytrain_fx.passes.ops import StepNodes

STEPS = 30
_NODES = tuple(name for name in vars(StepNodes) if not name.startswith("_"))
_ENGINE_CALLS = ("grad_offload", "arm_cpu", "arm_gpu", "arm_reload", "release", "wait")  # that nodes make
_AUTOGRAD = "pt_autograd"  # the name that torch gives them
_LAUNCHES = re.compile(r"cu(da)?LaunchKernel\w*|aten::(mm|addmm|convolution_backward)")
_SWITCHES = {"voluntary_ctxt_switches": "gave_up_core", "nonvoluntary_ctxt_switches": "taken_off_core", "se.nr_migrations": "changed_core"}
_COUNTED = re.compile(r"^([\w.]+)\s*:\s*(\d+)$", re.MULTILINE)


def launching(
    step: Callable[[], object], finish: Callable[[], None], launching_s: Callable[[], float | None], ours: nn.Module | None = None
) -> dict[str, Any]:
    """Figures of steps that follow one another, and of steps that begin once all is done.

    launching_s    how long the host was in the newest forward and backward; None: not known
    ours           the model, if it is compiled by this library

    Milliseconds a step, the median; by thread, how often in a step it left its core, by itself or
    not, and came to another one (where Linux tells); by call, how many in a step and microseconds
    each, under the profiler, which slows all of them; and by node of ours what `nodes` tells.
    """
    finish()
    found = {"in_a_row": _timed(step, lambda: None, launching_s), "each_after_a_drain": _timed(step, finish, launching_s)}
    if ours is not None:
        found["nodes"] = nodes(step, finish, ours)
    return found | {"calls": _calls(step, finish)}


def nodes(step: Callable[[], object], finish: Callable[[], None], model: nn.Module) -> dict[str, dict[str, float]]:
    """By inserted node: how often it ran in a step, and microseconds each, the median.

    `engine_us` of these are the engine's, whose calls are the driver's for the most part; the rest
    is Python's. What torch takes to find the operator is not in it, and no profiler runs. Each step
    begins once all updates are done, so that no node waits for one.
    """
    session, in_engine = session_of(model), [0.0]  # microseconds since the last node ended
    all_us: dict[str, list[tuple[float, float]]] = defaultdict(list)  # by node: its own, and the engine's of it

    def of_engine(_: str, us: float) -> None:
        in_engine[0] += us

    def of_node(name: str, us: float) -> None:
        all_us[name].append((us, in_engine[0]))
        in_engine[0] = 0.0

    with _watched(session.engine, _ENGINE_CALLS, of_engine), _watched(session.nodes, _NODES, of_node):
        for _ in range(STEPS):
            finish()
            in_engine[0] = 0.0
            step()
        finish()
    return {name: {"a_step": round(len(us) / STEPS, 1), "us_each": round(statistics.median(own for own, _ in us), 2),
                   "engine_us": round(statistics.median(engine for _, engine in us), 2)} for name, us in all_us.items()}


@contextmanager
def _watched(of: object, methods: Sequence[str], ended: Callable[[str, float], None]) -> Iterator[None]:
    """Tells how many microseconds each call of these methods took.

    Not of those that another one of them makes.
    """
    running: list[str] = []

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if running:
                return method(*arguments, **named)
            running.append(name)
            begin_s = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                ended(running.pop(), 1e6 * (time.perf_counter() - begin_s))

        return call

    try:
        for name in methods:
            setattr(of, name, watched(name, getattr(of, name)))
        yield
    finally:
        for name in methods:
            vars(of).pop(name, None)


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
