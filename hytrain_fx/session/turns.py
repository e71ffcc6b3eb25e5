"""Which thread may do what with one session, and in what order the locks are taken.

    calls     a thread is in the compiled call, or in step(): parameters are plain in the one and
              guarded after the other
    compiles  a graph is compiled: torch refuses compiled calls of other threads meanwhile, so they
              wait
    state     a thread changes, or reads, what the session keeps: never held while a graph runs
    (engine)  the engine's own lock, in each of its calls

A thread that has one of them takes none above it (`_ORDER`; `csrc/locks.h` goes on with the
engine's own). All but the engine's may be taken again by the thread that has it. With
HYTRAIN_FX_CHECK_LOCKS in the environment each acquisition is checked; the tests set it.

Nothing goes by who a thread is, except for speed: the thread that called `step()` last is the
loop's, and may run ahead of updates. Before another one calls the model, all weights are new, and
stay so until it returns. A backward's own threads are the loop's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from types import TracebackType
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from hytrain_fx.errors import EngineError
from hytrain_fx.torch_private.autograd import running_backward

CHECK_LOCKS: Final = "HYTRAIN_FX_CHECK_LOCKS"
_ORDER: Final = ("calls", "compiles", "state")
_READ_STEPS: Final = 16  # after another thread has last read a weight, the first time
_MORE: Final = 8  # so many times as many for one that comes again after them: it may come at any time
_MOST_READ_STEPS: Final = 10_000

P = ParamSpec("P")
R = TypeVar("R")


class Lock(Protocol):
    """What a re-entrant lock is used for."""

    def acquire(self, blocking: bool = True) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...


class CheckedLock:
    """A re-entrant lock that raises EngineError where it is taken out of order.

    So it is where a thread takes it while it holds a later one of the same session.

    For tests: an interrupt inside of it may leave it taken.
    """

    def __init__(self, name: str, later: Sequence[CheckedLock]) -> None:
        self._name, self._later = name, later
        self._lock = threading.RLock()
        self._holder = self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        thread = threading.get_ident()
        held = [lock._name for lock in self._later if lock._holder == thread]
        if held and self._holder != thread:
            raise EngineError(f"lock order: {self._name!r} is taken while {held} is held; the order is {_ORDER} (session/turns.py)")
        if not self._lock.acquire(blocking):
            return False
        self._holder, self._depth = thread, self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder = 0
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None:
        self.release()


def make_locks() -> dict[str, Lock]:
    """The locks of a session by name, checked where that is asked for."""
    if CHECK_LOCKS not in os.environ:
        return {name: threading.RLock() for name in _ORDER}
    made: dict[str, CheckedLock] = {}
    for name in reversed(_ORDER):
        made[name] = CheckedLock(name, tuple(made.values()))
    return dict(made)


class Turns:
    """The locks of one session, and what other threads than the loop's have done."""

    def __init__(self) -> None:
        locks = make_locks()
        self.calls, self.compiles, self.state = (locks[name] for name in _ORDER)
        self.called_elsewhere = False  # another thread has called the model since the last step()
        self._loop = threading.get_ident()
        self._forks = False  # with `state`
        self._steps_to_settle = 0
        self._read_steps = 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether the calling thread is neither the loop's nor one that runs a backward."""
        return threading.get_ident() != self._loop and running_backward() < 0

    @property
    def must_settle(self) -> bool:
        """Whether the compiled call to come must find all weights new.

        Another thread makes it, or has read weights lately.

        What such a thread reads during the call is not noticed, as parameters are plain then.
        """
        return self.is_elsewhere or self._steps_to_settle > 0

    def read(self) -> None:
        """A weight is read outside the compiled call."""
        if self.is_elsewhere:
            if self._steps_to_settle == 0:
                self._read_steps = min(max(_READ_STEPS, _MORE * self._read_steps), _MOST_READ_STEPS)
            self._steps_to_settle = self._read_steps

    def stepped(self) -> None:
        """The calling thread has called `step()`."""
        self._loop = threading.get_ident()
        self._steps_to_settle = max(0, self._steps_to_settle - 1)
        self.called_elsewhere = False

    def if_free(self, call: Callable[[Sequence[int]], None]) -> Callable[[Sequence[int]], None]:
        """`call` with `state`; nothing where another thread has it.

        Holds no session: nodes outlive theirs.
        """

        def maybe(rows: Sequence[int]) -> None:
            if self.state.acquire(blocking=False):
                try:
                    call(rows)
                finally:
                    self.state.release()

        return maybe

    def keep_whole_in_forks(self, settle: Callable[[], None]) -> None:
        """Before this process forks call `settle`.

        No other thread is in the middle of a change then: a child would find it half made.
        """
        pid = os.getpid()

        def before() -> None:
            if os.getpid() == pid:
                self.state.acquire()
                self._forks = True
                settle()

        def after() -> None:
            if self._forks:
                self._forks = False
                self.state.release()

        def in_child() -> None:
            locks = make_locks()
            self.calls, self.compiles = locks["calls"], locks["compiles"]  # a thread that is not there may have had them
            after()

        os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


class _Taking(Protocol):
    @property
    def turns(self) -> Turns: ...


S = TypeVar("S", bound=_Taking)


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that holds its object's `turns.state`."""

    @wraps(method)
    def held(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.turns.state:
            return method(self, *args, **kwargs)

    return held
