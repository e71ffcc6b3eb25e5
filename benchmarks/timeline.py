"""What a run of `ours` did when, and what recording it costs.

`hytrain_fx.record` records it after the timed windows.

A barrier as ZeRO-Offload has it: `step()` is called when the device has ended the backward, and the
next forward begins when every update has ended and every weight is back. Gradients go to the host
during the backward, as there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.session.session import Session

RECORDED_STEPS = 3
ROUNDS = 3


def drawn(model: nn.Module, step: Callable[[], object], finish: Callable[[], None], paths: Sequence[Path], barrier: bool) -> dict[str, Any]:
    """Record three steps, print and save them, with the predicted step below.

    With a barrier nothing is predicted.
    """
    step()
    finish()
    with hytrain_fx.record(model) as recording:
        for _ in range(RECORDED_STEPS):
            step()
    shown = recording.timeline if barrier else recording
    print(recording.timeline.last_step().text() if barrier else recording.text())
    for path in paths:
        shown.save(path)
    timeline = recording.timeline
    return {"overlap_share": timeline.overlap_share, "step_ended_at": timeline.step_ended_at,
            "longest_launch_us": timeline.longest_launch_us}


def recording_cost(model: nn.Module, step: Callable[[], object], finish: Callable[[], None], steps: int) -> dict[str, Any]:
    """Seconds a step without and with recording, and the share that recording adds (medians).

    Windows of `steps` steps take turns. In both no plan is made meanwhile.
    """
    off_s: list[float] = []
    on_s: list[float] = []
    for _ in range(ROUNDS):
        with _unrecorded(session_of(model)):
            off_s.append(_window_s(step, finish, steps))
        with hytrain_fx.record(model):
            on_s.append(_window_s(step, finish, steps))
    return {"off_s": off_s, "on_s": on_s, "cost_share": round(statistics.median(on_s) / statistics.median(off_s) - 1.0, 4)}


@contextmanager
def _unrecorded(session: Session) -> Iterator[None]:
    """Meanwhile the planner does not measure: it would record too."""
    session.planning.recording = True
    session.engine.record(False)
    try:
        yield
    finally:
        session.planning.recording = False


def _window_s(step: Callable[[], object], finish: Callable[[], None], steps: int) -> float:
    step()  # into an empty pipeline
    finish()
    begin_s = time.perf_counter()
    for _ in range(steps):
        step()
    finish()
    return (time.perf_counter() - begin_s) / steps
