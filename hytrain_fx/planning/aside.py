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
# them. So much is free that a plan settles, then it may be this share of the time.
_FREE_S: Final = 1.0
_SHARE: Final = 0.01
_log = logging.getLogger("hytrain_fx")


class Delay:
    """How long the loop has been held up by something. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since_s, self._took_s, self._told_s = clock(), 0.0, 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around it."""
        begin_s = self._clock()
        try:
            yield
        finally:
            self._took_s += self._clock() - begin_s

    @property
    def took_s(self) -> float:
        """How long it has, since the begin."""
        return self._took_s

    def lap_s(self) -> float:
        """How long since this was asked last."""
        lap_s, self._told_s = self._took_s - self._told_s, self._took_s
        return lap_s

    @property
    def is_little(self) -> bool:
        """Whether that is at most a second and a hundredth of the time."""
        return self._took_s <= _FREE_S + _SHARE * (self._clock() - self._since_s)

    def __str__(self) -> str:
        return f"{time_text(1e6 * self._took_s)}, {self._took_s / (self._clock() - self._since_s):.1%} of the time"


class Aside:
    """The rule that measuring, planning, recording and explaining never raise into the loop.

        with aside("making a plan"):
            ...             what training does not need: an error in it is logged, kept for
                            `explain`, and training goes on

    troubles    the last different errors, in sentences
    delay       of the loop by all of it
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.troubles: tuple[str, ...] = ()
        self.delay = Delay(clock)

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Use it around what training does not need.

        Interrupts pass. An engine that has failed says so at the loop's next call.
        """
        try:
            with self.delay():
                yield
        except Exception as error:
            text = f"{what} failed and was left out: {type(error).__name__}: {error}"
            if text not in self.troubles:
                _log.warning("%s", text, exc_info=True)
                self.troubles = (*self.troubles, text)[-_MOST_TROUBLES:]

    def in_words(self) -> str | None:
        """What to say of the delay. None where it is little."""
        return None if self.delay.is_little else f"measuring, planning and moving states held up the loop for {self.delay}"
