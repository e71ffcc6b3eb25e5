"""What schedules of torch.distributed.pipelining keep to themselves: their stages, and how many
micro-batches a step has.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from hytrain_fx.errors import ConfigError, UnsupportedError

_SCHEDULES: Final = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline.

    number          from 0
    count           stages of the pipeline, on all ranks
    micro_batches   of a step
    schedule        the name of the schedule's class
    group           the ranks that have the pipeline's stages; None: the default group
    made_in         the schedule itself, as long as the loop keeps it
    here            stages of the pipeline on this rank
    """

    number: int
    count: int
    micro_batches: int
    schedule: str
    group: Any = field(default=None, repr=False)
    made_in: weakref.ref[Any] | None = field(default=None, repr=False)
    here: int = 1

    def __str__(self) -> str:
        return f"stage {self.number} of {self.count} in a {self.schedule} of {self.micro_batches} micro-batches"


def stage_of(schedule: Any, model: nn.Module) -> Stage:
    """The stage of `schedule` whose module is `model`.

    Raises ConfigError for what is no schedule, or has no such stage; UnsupportedError for a
    schedule that computes gradients of weights by themselves, and where torch keeps stages
    elsewhere.
    """
    name = type(schedule).__name__
    if not type(schedule).__module__.startswith("torch.distributed.pipelining"):
        raise ConfigError(f"option pipeline={schedule!r}: expected None, or a schedule of torch.distributed.pipelining")
    if name not in _SCHEDULES:
        raise UnsupportedError(f"option pipeline: found a {name}, expected one of {', '.join(_SCHEDULES)}. Others compute gradients of "
                               "inputs and of weights apart, and a compiled backward makes both at once")
    try:
        stages = [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)
        found = [Stage(of.stage_index, of.num_stages, schedule._n_microbatches, name, of.group, weakref.ref(schedule), len(stages))
                 for of in stages if of.submod is model]
    except AttributeError as error:
        raise UnsupportedError(f"torch {torch.__version__} keeps the stages of a {name} elsewhere ({error}); "
                               "hytrain_fx was run on torch 2.11 and 2.13") from error
    if not found:
        raise ConfigError(f"option pipeline: no stage of this {name} on this rank has this model as its submod; "
                          "compile the module that the stage was made from: hytrain_fx.compile(stage.submod, optimizer, pipeline=schedule)")
    return found[0]
