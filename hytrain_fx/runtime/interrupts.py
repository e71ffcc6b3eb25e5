"""Ctrl+C comes between the parts of a training loop, as in plain code.

A step happens whole or not at all. So it is with every signal whose handler is Python and may
raise: the SIGTERM of a scheduler, the SIGALRM of a time limit, the SIGCHLD of a DataLoader.

Python runs a signal's handler between any two lines of the main thread. Within `whole` it is noted,
and runs at the end.
"""

from __future__ import annotations

# `signal` itself makes an enum member of each handler first: 10 us in each of our nodes.
import _signal  # type: ignore[import-not-found]
import functools
from _signal import getsignal, signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Handler = Callable[[int, FrameType | None], Any]
_SIGNALS: Final = tuple(
    getattr(_signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGXCPU")
    if hasattr(_signal, name)
)


@dataclass
class Gap:
    """Where an interrupt may break off a block of `whole`.

    `open`: whether it is raised at once. One that was raised has closed the gap, so that what
    cleans up after it is whole.
    """

    open: bool = False


class _Held:
    """Handlers of Python's, in whose place stands one that notes signals."""

    __slots__ = ("_gap", "_handlers", "_note", "_noted")

    def __init__(self, handlers: Mapping[int, _Handler], gap: Gap) -> None:
        self._handlers, self._gap = handlers, gap
        self._noted: dict[int, FrameType | None] = {}
        self._note = self._noting  # one object, to be found again

    def _noting(self, number: int, frame: FrameType | None) -> None:
        if not self._gap.open:
            self._noted.setdefault(number, frame)
            return
        self._gap.open = False
        self._handlers[number](number, frame)
        self._gap.open = True  # a handler of the user's that does not raise

    def begin(self) -> None:
        for number in self._handlers:
            signal(number, self._note)

    def end(self) -> None:
        try:
            self._put_back()
        finally:
            del self._note  # else the two would hold each other
            self._run()

    def _put_back(self) -> None:
        """Handlers to their places, all of them though one that is there again raises."""
        try:
            for number, handler in self._handlers.items():
                if getsignal(number) is self._note:  # else the user's code meanwhile has set another
                    signal(number, handler)
        except BaseException:
            self._put_back()
            raise

    def _run(self) -> None:
        """Run the handlers of what was noted, all of them though one raises."""
        while self._noted:
            number, frame = self._noted.popitem()
            try:
                self._handlers[number](number, frame)
            except BaseException:
                self._run()
                raise


class whole:  # read as a word: `with whole():`, `@whole()`
    """Protects what must not be left half-done.

    A signal that comes meanwhile is handled after it. Some 3 us in the main thread, less than 1 in
    others, where Python runs no handlers.

        with whole() as gap:
            begin()
            try:
                try:
                    gap.open = True
                    run()               the one part that a signal breaks off
                finally:
                    gap.open = False    one that comes before this line is raised from here
            finally:
                end()                   in every case

    As a decorator it protects each call of a function.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: _Held | None = None

    def __enter__(self) -> Gap:
        gap = Gap()
        handlers = _python_handlers()
        if not handlers:
            return gap
        held = _Held(handlers, gap)
        try:
            held.begin()
            self._held = held
        except BaseException:  # of a handler that was not yet held
            held.end()
            raise
        return gap

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            self._held.end()

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """`function`, each call of it protected."""

        @functools.wraps(function)
        def protected(*args: P.args, **kwargs: P.kwargs) -> T:
            handlers = _python_handlers()
            if not handlers:
                return function(*args, **kwargs)
            held = _Held(handlers, Gap())
            try:
                held.begin()
                return function(*args, **kwargs)
            finally:
                held.end()

        return protected


def _python_handlers() -> dict[int, _Handler]:
    """What Python would run here on a signal, by its number."""
    if get_ident() != main_thread().ident:
        return {}
    return {number: handler for number in _SIGNALS if callable(handler := getsignal(number))}
