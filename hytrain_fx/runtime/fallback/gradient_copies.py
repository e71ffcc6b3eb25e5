"""Gradients and their factors on their way to the host, and gradients on their way back.

A gradient's own buffer dies when the node returns. Its copy on the device, of which there are so
many bytes at a time, is let go when the compute stream has been made to wait for the D2H copy that
reads it: whatever is allocated on that stream from then on cannot overtake that copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.engine import CommitItem
from hytrain_fx.runtime.fallback.lanes import Event, Lane, Lanes, copy
from hytrain_fx.runtime.fallback.pipeline import Pipeline
from hytrain_fx.runtime.fallback.rows import Landing, Row, places_in


@dataclass(frozen=True, slots=True)
class _Held:
    gradient: torch.Tensor
    stream: torch.cuda.Stream | None  # where it was allocated
    read: Event


class Ring:
    """The copies that are alive, oldest first. Used by the launching thread alone."""

    def __init__(self, lanes: Lanes, limit_bytes: int) -> None:
        self._lanes = lanes
        self._limit_bytes = limit_bytes
        self._held: deque[_Held] = deque()
        self._held_bytes = 0

    def take(self, gradient: torch.Tensor) -> torch.Tensor:
        """A copy of `gradient`, made on the compute stream.

        The stream waits for older copies to be read where there are too many.
        """
        while self._held and (self._held_bytes + gradient.nbytes > self._limit_bytes or self._held[0].read.done()):
            self._let_go()
        return torch.empty_like(gradient).copy_(gradient)

    def _let_go(self) -> None:
        oldest = self._held.popleft()
        self._lanes.compute_wait(oldest.read, oldest.stream)
        self._held_bytes -= oldest.gradient.nbytes

    def free_after(self, copy: torch.Tensor, read: Event) -> None:
        """`copy` is read for the last time before `read`."""
        self._held.append(_Held(copy, self._lanes.compute_stream(), read))
        self._held_bytes += copy.nbytes

    def clear(self) -> None:
        """Let everything go; no copy may be under way."""
        self._held.clear()
        self._held_bytes = 0


class GradientCopies:
    """Starts the copies of one engine.

    `last_fetch`: when the gradients that were asked for last are there.

    ring_bytes   device memory for gradients on their way to the host
    """

    def __init__(self, pipeline: Pipeline, ring_bytes: int) -> None:
        self.last_fetch: Event | None = None
        self._pipeline = pipeline
        self._lanes = pipeline.lanes
        self._ring = Ring(self._lanes, ring_bytes)
        self._fetches: dict[int, Event] = {}  # not waited for yet, by number
        self._fetch_count = 0

    def send(self, row: Row, gradient: torch.Tensor) -> None:
        """Copy a gradient to the row's slot, chunk by chunk.

        Not under the lock: it may wait for memory.
        """
        slot = row.placed_states().slot
        assert slot is not None
        for number, chunk in enumerate(row.chunks):
            staged = self._ring.take(gradient[chunk.begin : chunk.end])
            self._lanes.wait(Lane.D2H, self._lanes.record_compute())
            begin = self._lanes.record(Lane.D2H) if self._pipeline.recording else None
            copy(self._lanes, Lane.D2H, slot[chunk.begin : chunk.end], staged)
            event = self._lanes.record(Lane.D2H)
            self._ring.free_after(staged, event)
            with self._pipeline.lock:
                row.landing = event
                self._pipeline.landings.append(Landing(event, row.index, number, row.generation, begin))
                self._pipeline.landed_cv.notify()

    def send_factors(self, items: Iterable[CommitItem], end: Event) -> dict[int, torch.Tensor]:
        """Start the copies of the factors that are tensors.

        Returns where each arrives on the host, by the tensor's identity.
        """
        scaled = [(item.row, f) for item in items if item.grad is None for f in item.factors if isinstance(f, torch.Tensor)]
        sources = {id(f): f for _, f in scaled}
        if not sources:
            return {}
        targets = self._lanes.host_floats(len(sources))
        self._lanes.wait(Lane.D2H, end)
        for target, source in zip(targets, sources.values(), strict=True):
            copy(self._lanes, Lane.D2H, target, source.detach())
        rows = dict.fromkeys(row for row, _ in scaled)
        self._pipeline.landings.append(Landing(self._lanes.record(Lane.D2H), keep=tuple(sources.values()), waiting=tuple(rows)))
        self._pipeline.landed_cv.notify()
        return dict(zip(sources, targets, strict=True))

    def bring(self, landed: Sequence[tuple[Event, torch.Tensor]], out: torch.Tensor) -> Event:
        """Copy gradients from their slots, when they are there, to `out`.

        Returns the event of their arrival.
        """
        places = places_in(out, [slot for _, slot in landed])
        self._lanes.wait(Lane.FETCH, self._lanes.record_compute())
        for landing in {id(landing): landing for landing, _ in landed}.values():
            self._lanes.wait(Lane.FETCH, landing)
        for place, (_, slot) in zip(places, landed, strict=True):
            copy(self._lanes, Lane.FETCH, place, slot)
        return self._lanes.record(Lane.FETCH)

    def note_fetch(self, arrival: Event) -> int:
        """The number by which to `take_fetch`. The lock is held."""
        self._fetch_count += 1
        self._fetches[self._fetch_count] = self.last_fetch = arrival
        return self._fetch_count

    def take_fetch(self, number: int) -> Event:
        """The arrival that was noted, once. Raises EngineError for another number.

        The lock is held.
        """
        arrival = self._fetches.pop(number, None)
        if arrival is None:
            raise EngineError(f"fetch {number} was never begun, or has been waited for")
        return arrival

    def clear(self) -> None:
        """Let everything go; no copy may be under way."""
        self._ring.clear()
