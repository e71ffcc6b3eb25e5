"""`weights="auto"` left weights on the device, and memory ran out there: they are streamed instead.

    before_call    before the loop calls the model: they begin to be, where a backward has said so
    repeats        a compiled forward has met torch.OutOfMemoryError: whether to call it again
    noticed        around a compiled backward, which cannot be called again

States give way first (memory_pressure.py). Graphs are captured again, with nodes that fetch. No bit
depends on where weights rest. What the loop holds of a weight keeps its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from hytrain_fx.config import Config
from hytrain_fx.errors import ConfigError, UnsupportedError
from hytrain_fx.passes.pipeline import chosen_passes
from hytrain_fx.planning.controller import Event
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.session.memory_pressure import RandomNumbers
from hytrain_fx.session.session import Session
from hytrain_fx.session.streaming import stream_weights
from hytrain_fx.session.weights_choice import choice_of


class LateStreaming:
    """That of one session. It holds the session weakly: graphs hold this."""

    def __init__(self, session: Session) -> None:
        self._session: Session = weakref.proxy(session)
        self._device = session.table.device
        choice = choice_of(session.config)
        left_there = choice is not None and choice.place == "resident" and not choice.hindrance
        self._config = _streamed(session.config) if left_there else None  # to go on with; None once that is done, or where it cannot be
        self._is_wanted = False
        self._noticed = session.graphs.noticed
        if self._config is not None:
            session.graphs.noticed = self.noticed

    def before_call(self) -> RandomNumbers | None:
        """Before a forward of the loop; what `repeats` wants, None where it would not repeat it."""
        if self._config is None or not torch.is_grad_enabled():
            return None
        if self._is_wanted and not self._session.nodes.gradients.any_in_place():
            self._begin()
        return RandomNumbers.now(self._device)

    def repeats(self, begun: RandomNumbers | None, error: torch.OutOfMemoryError) -> bool:
        """A forward has met the error, and no states gave way.

        If its repetition is exact and weights are streamed then: go back.
        """
        if begun is None or self._config is None:
            return False
        self._is_wanted = True
        if not self._is_repeatable or self._session.nodes.gradients.any_in_place() or not self._begin():
            self._say(error)
            return False
        begun.again(self._device)
        return True

    @property
    def _is_repeatable(self) -> bool:
        """Only a graph has run when memory runs out, and no code between graphs."""
        capture = self._session.capture
        return bool(capture.graphs) and not capture.breaks

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Around a compiled backward."""
        try:
            with self._noticed():
                yield
        except torch.OutOfMemoryError as error:
            self._is_wanted = self._config is not None
            self._say(error)
            raise

    def _say(self, error: torch.OutOfMemoryError) -> None:
        if self._is_wanted:
            error.add_note('hytrain_fx: weights="auto" left the weights on the device. Before the next forward that finds no gradient in '
                           "place they go to the host and are streamed: call optimizer.zero_grad() and repeat the step")

    def _begin(self) -> bool:
        """Stream what may be. Whether any weight is streamed now."""
        session, config, self._config, self._is_wanted = self._session, self._config, None, False
        assert config is not None
        why = f"memory ran out after {session.steps_done} steps, so weights are streamed from then on"
        with session.turns.state, whole():  # weights and graphs change together
            session.drain()
            session.follow_written_weights()
            session.nodes.gradients.before_move()
            session.engine.discard(range(session.engine.rows))
            session.nodes.fetched.wanted = session.eager.streamed.wanted = True
            try:
                stream_weights(session.eager.streamed, session.states, session.engine, session.resources, session.ranks, session.planning,
                               config)
            except UnsupportedError:
                session.nodes.fetched.wanted = session.eager.streamed.wanted = False
                return False
            session.config = config
            session.speculate(config.speculate, self._device.type == "cuda")
            session.graphs.capture_anew(chosen_passes(config.passes, streamed=True))
        session.eager.streamed.since = why
        for event in (Event.LOST, Event.ROOM):  # times without fetches are of no use
            session.planning.do(session.planning.controller.hear(event, why))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return True


def _streamed(config: Config) -> Config | None:
    """The same options with streamed weights; None where the others do not allow that."""
    try:
        return replace(config, weights="streamed")
    except ConfigError:
        return None
