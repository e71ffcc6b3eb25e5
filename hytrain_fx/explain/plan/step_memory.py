"""The device's memory over a step: as points in time, as a table with bars.

From sizes that are known: what is in use, what captured graphs keep for the backward, and gradients
that stay until their update. Times are those that were measured, where there are any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from hytrain_fx.cost_model.pieces import params_kept
from hytrain_fx.explain.plan.explained import Explained
from hytrain_fx.ir.figures import Table, bytes_text, time_text

_MOST_LINES: Final = 24
_BAR: Final = 40  # characters of the longest one


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """The device's bytes at one moment.

    what              what has just ended
    time_us           since the forward began; None before times are measured
    fixed_bytes       weights or their slots, states, ring, staging
    kept_bytes        what the forward has kept for the backward
    gradients_bytes   those that wait for an update on the device
    """

    what: str
    time_us: float | None
    fixed_bytes: int
    kept_bytes: int
    gradients_bytes: int

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.fixed_bytes + self.kept_bytes + self.gradients_bytes


def step_memory(e: Explained) -> tuple[MemoryPoint, ...]:
    """The beginning, the end of each unit's forward, then of each unit's backward, and the step.

    Empty before a backward is captured.
    """
    if not any(e.kept_bytes):
        return ()
    m, names = e.memory, [unit.name for unit in e.units]
    fixed = m.weights_bytes + m.weight_slots_bytes + m.device_states_bytes + m.ring_bytes + m.staging_bytes
    count, kept, gradients = len(names), list(accumulate(e.kept_bytes, initial=0)), _gradients_bytes(e)
    ended = [f"forward of {name}" for name in names] + [f"backward of {name}" for name in reversed(names)]
    return tuple(
        MemoryPoint(what, time_us, fixed, kept[min(at, 2 * count - at)], sum(gradients[2 * count - at :]) if at > count else 0)
        for at, (what, time_us) in enumerate(zip(["begin", *ended], _times_us(e, count), strict=True)))


def _gradients_bytes(e: Explained) -> list[int]:
    """By unit: gradients that are on the device until their update."""
    return [round(unit.grad_bytes * params_kept(e.plan, unit) / max(unit.params, 1)) for unit in e.units]


def _times_us(e: Explained, units: int) -> Sequence[float | None]:
    """When each point is, since the forward began."""
    m = e.measured
    if m is None or len(m.forward_us) != units:
        return [None] * (2 * units + 1)
    forwards = [us + stall_us for us, stall_us in zip(m.forward_us, m.stall_us, strict=True)]
    return list(accumulate([*forwards, *reversed(m.backward_us)], initial=0.0))


def step_memory_table(e: Explained) -> Table | None:
    """The points as lines with bars; None where there are none."""
    points = step_memory(e)
    if not points:
        return None
    most = max(points, key=lambda point: point.nbytes)
    rows = tuple((of.what, "-" if of.time_us is None else time_text(of.time_us), bytes_text(of.kept_bytes), bytes_text(of.gradients_bytes),
                  bytes_text(of.nbytes), _bar(of, most.nbytes)) for of in _shown(points, most))
    peak = e.memory.device_peak_bytes
    remarks = ("bars: = weights or their slots, states, ring and staging as in use; # what the forward keeps, by the captured graphs; "
               "+ gradients until their update",
               "what kernels take meanwhile and what the backward computes again is not in it"
               + ("" if peak is None else f"; CUDA's allocator saw a peak of {bytes_text(peak)}"))
    heads = ("after", "time", "activations", "gradients", "in all", "")
    title = f"device memory over a step, from known sizes: at most {bytes_text(most.nbytes)} after the {most.what}"
    return Table(title, heads, rows, remarks, words=(0, 5))


def _shown(points: Sequence[MemoryPoint], most: MemoryPoint) -> Iterator[MemoryPoint]:
    """As many as a page holds: every so many, the fullest and the last."""
    every = -(-len(points) // _MOST_LINES)
    for at, point in enumerate(points):
        if at % every == 0 or point is most or at == len(points) - 1:
            yield point


def _bar(point: MemoryPoint, most_bytes: int) -> str:
    ends = [round(_BAR * nbytes / max(most_bytes, 1)) for nbytes in
            accumulate((point.fixed_bytes, point.kept_bytes, point.gradients_bytes))]
    return "=" * ends[0] + "#" * (ends[1] - ends[0]) + "+" * (ends[2] - ends[1])
