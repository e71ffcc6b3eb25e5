"""`weights="auto"` left weights on the device, and memory ran out there: they are streamed instead.

The last to give way (memory_pressure.py). Graphs are captured again, with nodes that fetch. No bit
depends on where weights rest. What the loop holds of a weight keeps its memory.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

from hytrain_fx.config import Config
from hytrain_fx.errors import ConfigError, UnsupportedError
from hytrain_fx.passes.pipeline import chosen_passes
from hytrain_fx.planning.controller import Event
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.session.session import Session
from hytrain_fx.session.streaming import stream_weights
from hytrain_fx.session.weights_choice import choice_of


class LateStreaming:
    """That of one session, which it holds weakly: the session holds this."""

    def __init__(self, session: Session) -> None:
        self._session: Session = weakref.proxy(session)
        choice = choice_of(session.config)
        left_there = choice is not None and choice.place == "resident" and not choice.hindrance
        self._config = _streamed(session.config) if left_there else None  # to go on with; None once that is done, or where it cannot be

    @property
    def may(self) -> bool:
        """As of `GivesWay`: whether the weights are on the device, and need not be."""
        return self._config is not None

    def give(self, why: str) -> bool:
        """Stream what may be. Whether any weight is streamed now. No gradient is in place."""
        session, config, self._config = self._session, self._config, None
        if config is None:
            return False
        why = f"{why}, so weights are streamed from then on"
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
            session.speculate(config.speculate, session.table.device.type == "cuda")
            session.graphs.capture_anew(chosen_passes(config.passes, streamed=True))
        session.eager.streamed.since = why
        for event in (Event.LOST, Event.ROOM):  # times without fetches are of no use
            session.planning.do(session.planning.controller.hear(event, why))
        return True


def _streamed(config: Config) -> Config | None:
    """The same options with streamed weights; None where the others do not allow that."""
    try:
        return replace(config, weights="streamed")
    except ConfigError:
        return None
