"""Ctrl+C comes between the parts of a training loop, as in plain code: a step happens whole or not at all.

Python runs a signal's handler between any two lines of the main thread. Within `whole` it is noted, and runs at the end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def whole() -> Iterator[None]:
    """Around what must not be left half-done: an interrupt that comes meanwhile is raised after it. About 2 us."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # nothing of Python's would run here
        return
    noted: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(frame)

    try:
        signal.signal(signal.SIGINT, note)
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if noted:
            handler(signal.SIGINT, noted[0])
