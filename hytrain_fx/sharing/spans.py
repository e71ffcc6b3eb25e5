"""How long the device takes for its part of a batch, without a wait for it."""

from __future__ import annotations

import time

import torch


class DeviceSpan:
    """From `begin` to `end` on the device: by events in the loop's stream, or by the clock.

    A model on the CPU has done its part when `end` is called.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._events: list[torch.cuda.Event] = []
        self._times_s: list[float] = []

    def begin(self) -> None:
        """The device's part begins."""
        self._mark()

    def end(self) -> None:
        """All of it is launched."""
        self._mark()

    def _mark(self) -> None:
        if self._cuda is None:
            self._times_s.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._cuda))
        self._events.append(event)

    @property
    def begun(self) -> torch.cuda.Event | None:
        """The point of the loop's stream before the device's part; None for a model on the CPU."""
        return self._events[0] if self._events else None

    def us(self) -> float | None:
        """Microseconds between the two; None while the device is at work."""
        if self._cuda is None:
            begin_s, end_s = self._times_s
            return (end_s - begin_s) * 1e6
        begin, end = self._events
        return begin.elapsed_time(end) * 1e3 if end.query() else None
