"""When gradients and weights went from rank to rank, while a recording is on.

    GPU   two timing events around the collectives, on the stream that waits for them
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
class TimedCollectives:
    """Collectives that were sent together.

    row      the first of the parameters that are in them
    nbytes   of their buckets, all ranks' parts together: the same on each rank
    """

    kind: TaskKind
    row: int
    nbytes: int
    begin: At
    end: At


class CollectiveTimes:
    """Those of one device.

    recording   whether they are kept
    """

    def __init__(self, device: torch.device) -> None:
        self.recording = False
        self._clock = DeviceClock(device)
        self._timed: list[TimedCollectives] = []

    def record(self, on: bool) -> None:
        """Keep what comes from here on, or nothing."""
        self.recording = on
        self._timed = []

    @contextmanager
    def around(self, kind: TaskKind, row: int, nbytes: int) -> Iterator[None]:
        """Around collectives that are sent together, on the stream that waits for them."""
        begin = self._clock.now()
        yield
        self._timed.append(TimedCollectives(kind, row, nbytes, begin, self._clock.now()))

    def take(self) -> list[TimedCollectives]:
        """What was kept, once the device has reached the end of each."""
        timed, self._timed = self._timed, []
        for of in timed:
            self._clock.wait_for(of.end)
        return timed
