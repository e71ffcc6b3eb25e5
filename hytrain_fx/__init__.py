"""Hides the optimizer update behind training.

The one line to add is `model, optimizer = hytrain_fx.compile(model, optimizer)`.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hytrain_fx.config import Config
from hytrain_fx.errors import HytrainWarning
from hytrain_fx.ir.plan import Plan
from hytrain_fx.runtime.launch_queue import ask_for_long_queue

if TYPE_CHECKING:
    from hytrain_fx.api import close, compile, explain, inspect, metrics, record, settle
    from hytrain_fx.explain.timeline.stages import stages_timeline
    from hytrain_fx.loading.meta_parameters import on_meta
    from hytrain_fx.loading.recorded_init import from_init
    from hytrain_fx.loading.tensor_files import from_safetensors, from_torch
    from hytrain_fx.passes.base import graph_pass
    from hytrain_fx.passes.pipeline import DEFAULT_PASSES
    from hytrain_fx.runtime.lion import Lion
    from hytrain_fx.session.over_stages import clip_grad_norm_, tie_weights

__version__ = "0.1.0.dev0"
__all__ = [
    "DEFAULT_PASSES",
    "Config",
    "HytrainWarning",
    "Lion",
    "Plan",
    "clip_grad_norm_",
    "close",
    "compile",
    "explain",
    "from_init",
    "from_safetensors",
    "from_torch",
    "graph_pass",
    "inspect",
    "metrics",
    "on_meta",
    "record",
    "settle",
    "stages_timeline",
    "tie_weights",
]
_HOME = {  # of the others: hytrain_fx.api
    "DEFAULT_PASSES": "hytrain_fx.passes.pipeline",
    "Lion": "hytrain_fx.runtime.lion",
    "clip_grad_norm_": "hytrain_fx.session.over_stages",
    "from_init": "hytrain_fx.loading.recorded_init",
    "from_safetensors": "hytrain_fx.loading.tensor_files",
    "from_torch": "hytrain_fx.loading.tensor_files",
    "graph_pass": "hytrain_fx.passes.base",
    "on_meta": "hytrain_fx.loading.meta_parameters",
    "stages_timeline": "hytrain_fx.explain.timeline.stages",
    "tie_weights": "hytrain_fx.session.over_stages",
}

# The package `explain` puts itself here when it is imported. Done now and taken out, it cannot
# cover the function of that name later.
import_module("hytrain_fx.explain")
globals().pop("explain")

logging.getLogger("hytrain_fx").addHandler(logging.NullHandler())  # silent, until the program sets up its logging
ask_for_long_queue()  # compile() is too late: the model is on the GPU by then


def __getattr__(name: str) -> Any:
    """Import the functions and passes at first use.

    They import torch, which reports and `--help` do without.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, "hytrain_fx.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
