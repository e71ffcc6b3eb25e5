"""Device copies of gradients on their way to the host, at most so many bytes of them at a time.

A gradient's own buffer dies when the node returns. Its copy is let go when the compute stream has
been made to wait for the D2H copy that reads it: whatever is allocated on that stream from then on
cannot overtake that copy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from hytrain_fx.runtime.fallback.lanes import Event, Lanes


@dataclass(frozen=True, slots=True)
class _Held:
    gradient: torch.Tensor
    stream: torch.cuda.Stream | None  # where it was allocated
    read: Event


class Staging:
    """The copies that are alive, oldest first. Used by the launching thread alone."""

    def __init__(self, lanes: Lanes, limit_bytes: int) -> None:
        self._lanes = lanes
        self._limit_bytes = limit_bytes
        self._held: deque[_Held] = deque()
        self._held_bytes = 0

    def take(self, gradient: torch.Tensor) -> torch.Tensor:
        """A copy of `gradient`, made on the compute stream; the stream waits for older copies to be read where there are too many."""
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
