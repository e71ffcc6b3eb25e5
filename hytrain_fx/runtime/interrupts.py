"""Ctrl+C comes between the parts of a training loop, as in plain code.

A step happens whole or not at all.

Python runs a signal's handler between any two lines of the main thread. Within `whole` it is noted,
and runs at the end.
"""

from __future__ import annotations

import threading

# Those of `signal` make an enum member of each handler first: 10 us in each of our nodes.
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Gap:
    """Where an interrupt may break off a block of `whole`.

    `open`: whether it is raised at once. One that was raised has closed the gap, so that what
    cleans up after it is whole.
    """

    open: bool = False


@contextmanager
def whole() -> Iterator[Gap]:
    """Protects what must not be left half-done.

    An interrupt that comes meanwhile is raised after it. About 2 us.

        with whole() as gap:
            begin()
            try:
                try:
                    gap.open = True
                    run()               the one part that an interrupt breaks off
                finally:
                    gap.open = False    one that comes before this line is raised from here
            finally:
                end()                   in every case
    """
    gap = Gap()
    handler = getsignal(SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):
        yield gap  # nothing of Python's would run here
        return
    noted: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        if not gap.open:
            noted.append(frame)
            return
        gap.open = False
        handler(number, frame)
        gap.open = True  # a handler of the user's that does not raise

    try:
        signal(SIGINT, note)
        yield gap
    finally:
        # else the user's code in the gap has set another
        if getsignal(SIGINT) is note:
            signal(SIGINT, handler)
        if noted:
            handler(SIGINT, noted[0])
