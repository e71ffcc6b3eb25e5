"""A model, and an optimizer, are handed to `compile` once."""

from __future__ import annotations

from typing import Any

from torch import nn

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.session.call_gate import find_session
from hytrain_fx.session.optimizer import OffloadedOptimizer
from hytrain_fx.torch_private.modules import compiled_call


def require_new(module: Any, optimizer: Any) -> None:
    """Raise UnsupportedError for what is compiled already, by this library or by torch."""
    if isinstance(module, nn.Module) and find_session(module) is not None:
        raise UnsupportedError("this model is compiled already; call hytrain_fx.close(model) first to compile it again")
    if isinstance(module, nn.Module) and compiled_call(module) is not None:
        raise UnsupportedError("this model was compiled with Module.compile(); hand over the plain model, hytrain_fx compiles it itself")
    if isinstance(optimizer, OffloadedOptimizer):
        raise UnsupportedError("this optimizer was returned by hytrain_fx.compile() before; make a new one from model.parameters(), and "
                               "load the state_dict() of this one to go on with its states")
