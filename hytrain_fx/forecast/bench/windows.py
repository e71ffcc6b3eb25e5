"""Step time: wall time over windows of consecutive steps, each ended by a full drain.

Within a window nothing waits for the device. The warm-up goes on while plans are still made.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from hytrain_fx.forecast.bench.energy import energy_fields
from hytrain_fx.forecast.bench.loops import B, Trainer
from hytrain_fx.runtime.energy import Meter

WINDOWS = 3
OUR_WARMUP_STEPS = 30  # measures, plans and looks again twice
OTHER_WARMUP_STEPS = 3  # fills caches
# Without a new plan, and with no way of updating still being tried, before the first window; and
# how long that is waited for.
CALM_STEPS, MOST_CALMING_STEPS = 10, 210
_LAUNCHES = 7


def timed(trainer: Trainer[B], batches: Iterator[B], warmup: int, window: int, device: torch.device, meter: Meter,
          step_tokens: int) -> dict[str, Any]:
    """Three windows of `window` steps: the median, each, and the spread over the median.

    `held_up_s`: how long planning held the loop up in a step of each window; the device may have
    had work meanwhile. Peaks of device memory are the peaks in the windows. Energy is summed over
    all three windows and given for each step and each of its `step_tokens`. Launching is timed
    after the windows, on a GPU.
    """
    warmup = warm_up(trainer, batches, warmup)
    plans = trainer.plans()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = meter.read()
    seconds, held_up = zip(*(_window_s(trainer, batches, window) for _ in range(WINDOWS)), strict=True)
    energy = energy_fields(meter, before, meter.read(), WINDOWS * window, step_tokens)
    median = statistics.median(seconds)
    return {"step_s": round(median, 5), "windows_s": [round(s, 5) for s in seconds], "window_steps": window,
            "warmup_steps": warmup, "plans_in_windows": trainer.plans() - plans,
            "held_up_s": [round(s, 5) for s in held_up], "spread": round((max(seconds) - min(seconds)) / median, 4), **energy,
            **(_launching(trainer, batches) if device.type == "cuda" else {})}  # on a CPU it is the computation itself


def warm_up(trainer: Trainer[B], batches: Iterator[B], steps: int) -> int:
    """Run `steps`, and more while plans are still made or ways are tried; the number of steps run.

    Making a plan holds up a step.
    """
    ran = calm = 0
    plans = trainer.plans()
    while ran < steps or (calm < min(CALM_STEPS, steps) and ran < steps + MOST_CALMING_STEPS):
        trainer.step(next(batches))
        calm, plans = (calm + 1 if trainer.plans() == plans and not trainer.tries() else 0), trainer.plans()
        ran += 1
    trainer.finish()
    return ran


def _window_s(trainer: Trainer[B], batches: Iterator[B], steps: int) -> tuple[float, float]:
    """The mean time of its steps, and what of it planning held the loop up."""
    begin, held_up = time.perf_counter(), trainer.held_up_s()
    for _ in range(steps):
        trainer.step(next(batches))
    trainer.finish()
    return (time.perf_counter() - begin) / steps, (trainer.held_up_s() - held_up) / steps


def _launching(trainer: Trainer[B], batches: Iterator[B]) -> dict[str, float]:
    """The median time of the host in a forward and backward that found nothing to wait for.

    Nothing, and no step more, for ways that do not tell it.
    """
    if trainer.launching_s() is None:
        return {}
    found: list[float] = []
    for _ in range(_LAUNCHES):
        trainer.step(next(batches))
        trainer.finish()
        found += filter(None, [trainer.launching_s()])
    return {"launching_s": round(statistics.median(found), 6)}
