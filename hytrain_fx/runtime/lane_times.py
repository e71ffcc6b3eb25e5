"""When gradients and weights went from rank to rank, and weights from the host to slots.

It is kept while a recording is on, and while planning measures steps.

    GPU   two timing events around them: of collectives on the stream that waits for them
    CPU   the host's clock before and after them

A rank that comes first waits in the collective for the slowest: that wait is in its times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hytrain_fx.ir.task_graph import TaskKind
from hytrain_fx.runtime.device_clock import At, DeviceClock


@dataclass(frozen=True, slots=True)
class Timed:
    """Collectives that were sent together, or the copies of one unit's weights.

    row      the first of the parameters that are in them
    nbytes   of their buckets, all ranks' parts together: the same on each rank; of the copies
    """

    kind: TaskKind
    row: int
    nbytes: int
    begin: At
    end: At


class LaneTimes:
    """Those of one device.

    recording   whether they are kept
    """

    def __init__(self, device: torch.device) -> None:
        self.recording = False
        self._clock = DeviceClock(device)
        self._timed: list[Timed] = []

    def record(self, on: bool) -> None:
        """Keep what comes from here on, or no more: what is kept stays until it is taken."""
        self.recording = on
        if on:
            self._timed = []

    @contextmanager
    def around(self, kind: TaskKind, row: int, nbytes: int) -> Iterator[None]:
        """Around them, in whose stream they are. Nothing is kept while no recording is on."""
        if not self.recording:
            yield
            return
        begin = self._clock.now()
        yield
        self._timed.append(Timed(kind, row, nbytes, begin, self._clock.now()))

    def take_reached(self) -> list[Timed]:
        """What was kept, without what the device has not ended yet: that is forgotten."""
        timed, self._timed = self._timed, []
        return [of for of in timed if self._clock.is_reached(of.end)]

    def take(self) -> list[Timed]:
        """What was kept, once the device has reached the end of each."""
        timed, self._timed = self._timed, []
        for of in timed:
            self._clock.wait_for(of.end)
        return timed
