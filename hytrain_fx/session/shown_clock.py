"""The start-up's clock. On a terminal it shows what takes long: compiling, moving states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from hytrain_fx.ir.startup import Phase, StartupClock
from hytrain_fx.progress import stage
from hytrain_fx.runtime.garbage import FullCollections

_WORDS = {
    Phase.COMPILE_FORWARD: "torch.compile, forward", Phase.COMPILE_BACKWARD: "torch.compile, backward",
    Phase.MASTERS: "allocating optimizer states", Phase.MOVE: "moving optimizer states",
}


class ShownClock(StartupClock):
    """Shows the outermost phase, after the start-up too: a model may be compiled again.

    collections   full collections of garbage since the start-up
    """

    def __init__(self) -> None:
        super().__init__()
        self.collections = FullCollections()
        self._shown: ExitStack | None = None

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """The block is in this phase."""
        within = super().phase(phase)
        return within if phase not in _WORDS or self._shown is not None else self._showing(phase, within)

    def step_ends(self) -> bool:
        """Whether the start-up has ended with this step."""
        ended = super().step_ends()
        if ended:
            self.collections.forget()
        return ended

    def open(self, phase: Phase) -> None:
        """In this phase from here to `close`."""
        super().open(phase)
        self._show(phase)

    def close(self, phase: Phase) -> None:
        """The end of what `open` began, if it did."""
        super().close(phase)
        self._end()

    @contextmanager
    def _showing(self, phase: Phase, within: AbstractContextManager[None]) -> Iterator[None]:
        self._show(phase)
        try:
            with within:
                yield
        finally:
            self._end()

    def _show(self, phase: Phase) -> None:
        if self._shown is None and phase in _WORDS:
            self._shown = ExitStack()
            self._shown.enter_context(stage(f"hytrain_fx: {_WORDS[phase]}", quiet=True))

    def _end(self) -> None:
        if self._shown is not None:
            self._shown.close()
            self._shown = None
