"""What parameters and graphs call of a session without keeping it alive: hooks hold it weakly, and so does the end of a model."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from hytrain_fx.errors import EngineError
from hytrain_fx.ops import NODES
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.step_nodes import SessionNodes


class Called(Protocol):
    """What the callbacks reach of a session."""

    nodes: SessionNodes
    eager_rows: set[int]

    def touch(self, parameter: nn.Parameter) -> None: ...
    def settle_one(self, parameter: nn.Parameter) -> None: ...


def settle_of(session: weakref.ref[Called]) -> Callable[[nn.Parameter], None]:
    """What a guarded parameter calls before it counts as touched."""

    def settle(parameter: nn.Parameter) -> None:
        found = session()
        if found is not None:
            found.settle_one(parameter)

    return settle


def touch_of(session: weakref.ref[Called]) -> Callable[[nn.Parameter], None]:
    """What a guarded parameter calls when eager code reaches it."""

    def on_touch(parameter: nn.Parameter) -> None:
        found = session()
        if found is not None:
            found.touch(parameter)

    return on_touch


def eager_gradient_of(session: weakref.ref[Called], row: int) -> Callable[[torch.Tensor], None]:
    """What autograd calls when it has added to a parameter's `.grad`."""

    def on_gradient(parameter: torch.Tensor) -> None:
        found = session()
        if found is not None and found.nodes.gradients.is_eager(row):  # torch calls it for the graphs' None gradients too
            found.eager_rows.add(row)
            found.nodes.gradients.parts.several.add(row)

    return on_gradient


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method for torch to keep, which lives as long as compiled code does: it keeps nothing of a session alive.

    Raises EngineError once the model is closed or gone.
    """
    found = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = found()
        if alive is None:
            raise EngineError("a graph of a model that was closed or dropped was called; compile the model again")
        return alive(*args, **kwargs)

    return call


def shut_down(
    engine: Engine, number: int, rows: int, pid: int, model: weakref.ref[nn.Module], restore: Callable[[], None]
) -> None:
    """Finish what is committed and stop the threads; runs when the model dies, at `close`, and at interpreter exit.

    restore    gives every parameter its memory; parameters may outlive their model, not the process
    """
    if os.getpid() != pid:
        return  # a forked child has no threads to stop
    try:
        if model() is None:
            restore()
        engine.drain(range(rows))
    finally:
        engine.close()
        NODES.unregister(number)
