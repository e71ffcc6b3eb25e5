"""Moments of a device on the host's monotonic clock: those of streams next to those of threads.

A moment is a timing event on a GPU, and a reading of that clock, in microseconds, on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

At = float | torch.cuda.Event
ClockUs = Callable[[At], float]
"""From a moment that the device has reached to microseconds on the host's monotonic clock."""


class DeviceClock:
    """The clock of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def now(self) -> At:
        """The moment that the current stream has come to. Each makes an event."""
        if self._device.type != "cuda":
            return time.perf_counter() * 1e6
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reading(self) -> ClockUs:
        """One reading of both clocks. Moments that are compared need the same one.

        Moments must have been reached before.
        """
        if self._device.type != "cuda":
            return lambda at: elapsed_us(0.0, at)  # on the CPU they are on that clock
        # A stream without work, so that waiting for it is not waiting for the device. It has its
        # own priority: streams of one priority share a few queues to the device.
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=-1)
        now = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._device):
            now.record(self._stream)
            now.synchronize()
        now_us = time.perf_counter() * 1e6
        return lambda at: now_us - elapsed_us(at, now)

    def wait_for(self, at: At) -> None:
        """Return when the device has reached it."""
        if isinstance(at, torch.cuda.Event):
            with torch.cuda.device(self._device):  # torch asks the thread's own device: it would make a context there
                at.synchronize()

    def is_reached(self, at: At) -> bool:
        """Whether the device has reached it."""
        if isinstance(at, torch.cuda.Event):
            with torch.cuda.device(self._device):  # as above
                return bool(at.query())
        return True


def elapsed_us(begin: At, end: At) -> float:
    """Microseconds from one moment to another of the same device. Both must have been reached."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return float(begin.elapsed_time(end)) * 1e3
    assert isinstance(end, float)
    return end - begin
