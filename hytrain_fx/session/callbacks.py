"""What parameters and graphs call of a session without keeping it alive.

Hooks hold it weakly, and so does the end of a model.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from hytrain_fx.errors import EngineError
from hytrain_fx.passes.ops import NODES
from hytrain_fx.runtime.engine import Engine

R = TypeVar("R")


def if_alive(method: Callable[[nn.Parameter], R]) -> Callable[[nn.Parameter], R | None]:
    """The same method of a session for guarded parameters to call.

    None, and nothing done, once the session is gone.
    """
    found = weakref.WeakMethod(method)

    def call(parameter: nn.Parameter) -> R | None:
        alive = found()
        return None if alive is None else alive(parameter)

    return call


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method for torch to keep, which lives as long as compiled code does.

    It keeps nothing of a session alive.

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
    engine: Engine, number: int, pid: int, model: weakref.ref[nn.Module], restore: Callable[[], None]
) -> None:
    """Finish what is committed and stop the threads.

    Runs when the model dies, at `close`, and at interpreter exit.

    restore    gives every parameter its memory; parameters may outlive their model, not the process
    """
    if os.getpid() != pid:
        return  # a forked child has no threads to stop
    try:
        if model() is None:
            restore()
        engine.drain(range(engine.rows))
    finally:
        engine.close()
        NODES.unregister(number)
