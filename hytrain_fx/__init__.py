"""Hides the optimizer update behind training: `model, optimizer = hytrain_fx.compile(model, optimizer)`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hytrain_fx.config import Config
from hytrain_fx.ir.plan import Plan
from hytrain_fx.runtime.launch_queue import ask_for_long_queue

if TYPE_CHECKING:
    from hytrain_fx.api import close, compile, explain, inspect, record, settle

__version__ = "0.1.0.dev0"
__all__ = ["Config", "Plan", "close", "compile", "explain", "inspect", "record", "settle"]

# The package `explain` puts itself here when it is imported; done now and taken out, it cannot cover the function of that name later.
import_module("hytrain_fx.explain")
globals().pop("explain")

ask_for_long_queue()  # compile() would be too late: the model is on the GPU by then


def __getattr__(name: str) -> Any:
    """The functions of `api`, at first use: it imports torch, which reports and `--help` do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("hytrain_fx.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
