"""Ctrl+C comes between the parts of a training loop, as in plain code.

A step happens whole or not at all.

Python runs a signal's handler between any two lines of the main thread. Within `whole` it is noted,
and runs at the end.
"""

from __future__ import annotations

import functools

# Those of `signal` make an enum member of each handler first: 10 us in each of our nodes.
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Handler = Callable[[int, FrameType | None], Any]


@dataclass
class Gap:
    """Where an interrupt may break off a block of `whole`.

    `open`: whether it is raised at once. One that was raised has closed the gap, so that what
    cleans up after it is whole.
    """

    open: bool = False


class whole:  # read as a word: `with whole():`, `@whole()`
    """Protects what must not be left half-done.

    An interrupt that comes meanwhile is raised after it. About 1 us in the main thread, a fifth of
    that in others, where Python runs no handlers.

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

    As a decorator it protects each call of a function.
    """

    __slots__ = ("_handler", "_note", "_noted")

    def __init__(self) -> None:
        self._noted: list[FrameType | None] = []
        self._note: _Handler | None = None

    def __enter__(self) -> Gap:
        gap = Gap()
        handler = _python_handler()
        if handler is None:
            return gap
        noted = self._noted

        def note(number: int, frame: FrameType | None) -> None:
            if not gap.open:
                noted.append(frame)
                return
            gap.open = False
            handler(number, frame)
            gap.open = True  # a handler of the user's that does not raise

        self._handler, self._note = handler, note
        signal(SIGINT, note)
        return gap

    def __exit__(self, *_: object) -> None:
        if self._note is not None:
            _end(self._note, self._handler, self._noted)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """`function`, each call of it protected."""

        @functools.wraps(function)
        def protected(*args: P.args, **kwargs: P.kwargs) -> T:
            handler = _python_handler()
            if handler is None:
                return function(*args, **kwargs)
            noted: list[FrameType | None] = []

            def note(number: int, frame: FrameType | None) -> None:
                noted.append(frame)

            try:
                signal(SIGINT, note)
                return function(*args, **kwargs)
            finally:
                _end(note, handler, noted)

        return protected


def _python_handler() -> _Handler | None:
    """What Python would run here on an interrupt; None where it would run nothing."""
    if get_ident() != main_thread().ident:
        return None
    handler = getsignal(SIGINT)
    return handler if callable(handler) else None


def _end(note: _Handler, handler: _Handler, noted: Sequence[FrameType | None]) -> None:
    # else the user's code meanwhile has set another
    if getsignal(SIGINT) is note:
        signal(SIGINT, handler)
    if noted:
        handler(SIGINT, noted[0])
