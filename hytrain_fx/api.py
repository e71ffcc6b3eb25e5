"""The public functions: the one place that wires the rooms together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hytrain_fx.config import Config
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.optimizer import OffloadedOptimizer
from hytrain_fx.session import Session, find_session
from hytrain_fx.state_dict import load_states
from hytrain_fx.torch_private import compiled_call, set_compiled_call


def compile(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> tuple[nn.Module, OffloadedOptimizer]:
    """Compile `model` in place and take over `optimizer`; the loop around them stays as it is.

    Returns the same module object and an optimizer that shares `param_groups` with the given one. Options: see `Config`.
    The optimizer may have run before: its states are taken along. Raises ConfigError, UnsupportedError, HostMemoryError, EngineError.
    """
    config = Config.from_options(**options)
    if isinstance(model, nn.Module) and find_session(model) is not None:
        raise UnsupportedError("this model is compiled already; call hytrain_fx.close(model) first to compile it anew")
    if isinstance(model, nn.Module) and compiled_call(model) is not None:
        raise UnsupportedError("this model was compiled with Module.compile(); hand over the plain model, hytrain_fx compiles it itself")
    before = optimizer.state_dict() if isinstance(optimizer, torch.optim.Optimizer) and optimizer.state else None
    session = Session(model, optimizer, config)
    ours = OffloadedOptimizer(optimizer, session)
    if before is not None:
        load_states(session, ours.param_groups, before)
    return model, ours


def close(model: nn.Module) -> None:
    """Finish committed updates, stop the threads and free the optimizer states; the weights stay as trained.

    Raises UnsupportedError for a model that is not compiled.
    """
    session = session_of(model)
    session.close()
    set_compiled_call(model, None)


def session_of(model: nn.Module) -> Session:
    """The session of a compiled model. Raises UnsupportedError for a model that is not compiled."""
    session = find_session(model)
    if session is None:
        raise UnsupportedError(f"this {type(model).__name__} is not compiled with hytrain_fx.compile()")
    return session
