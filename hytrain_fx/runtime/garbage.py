"""Python's garbage collector beside a training loop.

torch.compile leaves some million objects, and a full collection looks at each of them: 0.7 s on a
server whose memory the updates use. Python begins one when the objects that outlived two smaller
collections are a quarter of all. So what a step makes for a moment should be in none of them.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from hytrain_fx.ir.figures import time_text

_FULL: Final = 2  # the generation of a full collection
_TELLING_SHARE: Final = 0.01  # of the time, from which it is worth a line


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected inside, in any thread. May be nested."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class FullCollections:
    """Counts full collections while it lives.

    count       of those that have ended, since `forget`
    total_us    how long these held up the loop
    """

    def __init__(self) -> None:
        self.forget()
        self._began_s: float | None = None
        told = weakref.WeakMethod(self._told)

        def tell(phase: str, info: Mapping[str, int]) -> None:
            if (of := told()) is not None and info["generation"] == _FULL:
                of(phase)

        gc.callbacks.append(tell)
        weakref.finalize(self, gc.callbacks.remove, tell)

    def forget(self) -> None:
        """Count from here."""
        self.count, self.total_us = 0, 0.0
        self._since_s = time.perf_counter()

    def in_words(self) -> str | None:
        """What to say of them. None where they took too little of the time since `forget`."""
        share = self.total_us * 1e-6 / max(time.perf_counter() - self._since_s, 1e-9)
        if share < _TELLING_SHARE:
            return None
        return (f"Python's garbage collector looked at every object {self.count} times since the start-up, and held up the loop for "
                f"{time_text(self.total_us)}, {share:.1%} of the time: call gc.freeze() after the first steps")

    def _told(self, phase: str) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        elif self._began_s is not None:
            self.count += 1
            self.total_us += (time.perf_counter() - self._began_s) * 1e6
            self._began_s = None
