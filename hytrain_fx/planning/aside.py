"""Errors of what training does not need never reach the loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_MOST_TROUBLES = 5
_log = logging.getLogger("hytrain_fx")


class Aside:
    """The rule that measuring, planning, recording and explaining never raise into the loop.

        with aside("making a plan"):
            ...             what training does not need: an error in it is logged, kept for
                            `explain`, and training goes on

    troubles    the last different errors, in sentences
    """

    def __init__(self) -> None:
        self.troubles: tuple[str, ...] = ()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Use it around what training does not need.

        Interrupts pass. An engine that has failed says so at the loop's next call.
        """
        try:
            yield
        except Exception as error:
            text = f"{what} failed and was left out: {type(error).__name__}: {error}"
            if text not in self.troubles:
                _log.warning("%s", text, exc_info=True)
                self.troubles = (*self.troubles, text)[-_MOST_TROUBLES:]
