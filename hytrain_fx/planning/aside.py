"""What training does not need: its errors never reach the loop, and its time is bounded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from hytrain_fx.ir.figures import time_text

_MOST_TROUBLES = 5
# Predictions of a large model take a tenth of a second and more, and the launching thread makes
# them. So many are free that a plan settles, then they may take this share of the time.
_FREE_S: Final = 2.0
_SHARE: Final = 0.01
_log = logging.getLogger("hytrain_fx")


class Aside:
    """The rule that measuring, planning, recording and explaining never raise into the loop.

        with aside("making a plan"):
            ...             what training does not need: an error in it is logged, kept for
                            `explain`, and training goes on

    troubles    the last different errors, in sentences
    held_us     how long the loop waited for all of it
    """

    def __init__(self) -> None:
        self.troubles: tuple[str, ...] = ()
        self.held_us = 0.0
        self._since_s = time.perf_counter()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Use it around what training does not need.

        Interrupts pass. An engine that has failed says so at the loop's next call.
        """
        begin_s = time.perf_counter()
        try:
            yield
        except Exception as error:
            text = f"{what} failed and was left out: {type(error).__name__}: {error}"
            if text not in self.troubles:
                _log.warning("%s", text, exc_info=True)
                self.troubles = (*self.troubles, text)[-_MOST_TROUBLES:]
        finally:
            self.held_us += (time.perf_counter() - begin_s) * 1e6

    def in_words(self) -> str | None:
        """What to say of the time. None where it is no more than looks may take."""
        held_s, since_s = self.held_us * 1e-6, time.perf_counter() - self._since_s
        if held_s <= _FREE_S + _SHARE * since_s:
            return None
        share = held_s / since_s
        return f"measuring, planning and moving states held up the loop for {time_text(self.held_us)}, {share:.1%} of the time"


class Looks:
    """How much of the time looks at other plans have taken. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since_s, self._took_s = clock(), 0.0

    @property
    def may(self) -> bool:
        """Whether there is time for another."""
        return self._took_s <= _FREE_S + _SHARE * (self._clock() - self._since_s)

    @contextmanager
    def look(self) -> Iterator[None]:
        """Around one."""
        begin_s = self._clock()
        try:
            yield
        finally:
            self._took_s += self._clock() - begin_s
