"""Models that are spread over several processes or devices are refused by name.

Gradients that captured graphs hand to us never reach a wrapper's hooks. torch has two forms. A
wrapper keeps the model as its `module` (DistributedDataParallel); sharding changes the class of a
module and makes DTensors of its parameters (`fully_shard`).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Final

from torch import nn

from hytrain_fx.config import Config
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.torch_private.pipelining import stage_of

_EXPECTED: Final = "expected a plain torch.nn.Module on one device; hytrain_fx averages the gradients of a process group's ranks itself"


def require_unwrapped(model: nn.Module) -> None:
    """Raises UnsupportedError where the model, a module or a parameter of it is spread.

    The error says where that is and what to do.
    """
    modules = (_module(f"model.{path}" if path else "model", module) for path, module in model.named_modules())
    parameters = (_parameter(f"model.{path}", parameter) for path, parameter in model.named_parameters())
    for found, inside in filter(None, (*modules, *parameters)):
        raise UnsupportedError(f"{found}; {_EXPECTED}. Hand over {inside}, or leave hytrain_fx out and use torch.compile")


def as_stage(config: Config, model: nn.Module) -> Config:
    """The options, with the stage that the model is in place of its pipeline's schedule.

    Ranks of a pipeline train different models, so the default group is none that averages.

    Raises as `stage_of` does.
    """
    if config.pipeline is None:
        return config
    return replace(config, pipeline=stage_of(config.pipeline, model), process_group=config.process_group or False)


def _module(where: str, module: nn.Module) -> tuple[str, str] | None:
    """What was found and what to hand over instead; None for a plain module."""
    name = type(module).__name__
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return f"{where} is a {name}", f"the module inside it ({where}.module)"
    if _is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
        return f"{where} is a {name}", "the module as it was before it was wrapped"
    if _is_a(module, "torch.distributed.fsdp", "FSDPModule"):
        return f"{where} was sharded by fully_shard()", "the module as it was before that"
    return None


def _parameter(where: str, parameter: nn.Parameter) -> tuple[str, str] | None:
    split = _is_a(parameter, "torch.distributed.tensor", "DTensor")
    return (f"{where} is a DTensor", "the module as it was before it was split") if split else None


def _is_a(thing: object, module: str, name: str) -> bool:
    """The check does not import, which takes 0.6 s.

    A module that nobody has imported has made no object.
    """
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(thing, kind)
