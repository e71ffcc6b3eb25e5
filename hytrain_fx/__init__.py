"""Hides the optimizer update behind training: `model, optimizer = hytrain_fx.compile(model, optimizer)`."""

from hytrain_fx.api import close, compile
from hytrain_fx.config import Config
from hytrain_fx.ir.plan import Plan

__all__ = ["Config", "Plan", "close", "compile"]
