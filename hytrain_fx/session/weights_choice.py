"""`weights="auto"`: counts what a model takes of its device, and decides where its weights rest.

Decided once, before anything is made or loaded, and alike for a model on the meta device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from hytrain_fx.capture.units import Unit, group_units
from hytrain_fx.config import Config, DecidedConfig
from hytrain_fx.errors import EngineError
from hytrain_fx.ir.limits import UNITS_AHEAD
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.states import MASTER_ALONE
from hytrain_fx.ir.weights_choice import DeviceNeeds, WeightsChoice
from hytrain_fx.loading.loaded import device_of, may_wait
from hytrain_fx.runtime import memory
from hytrain_fx.runtime.launch import STAGING_BYTES, ring_bytes_for
from hytrain_fx.runtime.native import libraries
from hytrain_fx.runtime.native.storage_memory import can_put
from hytrain_fx.runtime.ranks import count_of_ranks
from hytrain_fx.runtime.states.memory_estimate import RowSize
from hytrain_fx.runtime.states.streamed_homes import may_stream
from hytrain_fx.runtime.updates import kernel_update
from hytrain_fx.weights.device_slots import bytes_of_slots


def with_weights_chosen(model: Any, optimizer: Any, config: Config) -> Config:
    """The options with the place of weights decided, where that is left to us.

    Raises ConfigError as the ring's size and the device do.
    """
    if config.weights != "auto":
        return config
    counted = _counted(model, optimizer)
    if counted is None:  # `compile` says what it expects
        return replace(config, weights="resident")
    device = counted.parameters[0].device if config.loader is None else device_of(config)
    tensors = [*model.parameters(), *model.buffers()]
    there_bytes = sum(of.nbytes for of in tensors if of.device == device)
    choice = WeightsChoice(counted.needs(config, tensors), memory.room_bytes(device, there_bytes))
    if not choice.fits:
        choice = replace(choice, hindrance=_hindrance(optimizer, config, choice.needs))
    options = {option.name: getattr(config, option.name) for option in fields(Config)}
    return DecidedConfig(**options | {"weights": choice.place}, weights_choice=choice)


def choice_of(config: Config) -> WeightsChoice | None:
    """What was decided; None where the place of weights was given."""
    return config.weights_choice if isinstance(config, DecidedConfig) else None


@dataclass(frozen=True, eq=False)
class _Counted:
    """The trained parameters of a model, and what rests with them.

    sizes    of each parameter, with its states
    units    rows are positions in `parameters`
    """

    parameters: Sequence[nn.Parameter]
    sizes: Sequence[RowSize]
    units: Sequence[Unit]

    def needs(self, config: Config, tensors: Sequence[torch.Tensor]) -> DeviceNeeds:
        """In bytes. `tensors`: all that the model has."""
        fixed = self._fixed_units(config)
        streamed = [[self.parameters[row].nbytes for row in unit.rows if _may_be_streamed(self.parameters[row])]
                    for unit in self.units if unit.name not in fixed]
        staging_bytes = STAGING_BYTES if config.ring_bytes is not None and config.stream != 0 else 0
        return DeviceNeeds(
            weights_bytes=sum(of.nbytes for of in tensors),
            streamed_bytes=sum(chain.from_iterable(streamed)),
            slots_bytes=bytes_of_slots(filter(None, streamed), UNITS_AHEAD + 1),
            states_bytes=self._states_bytes(config, fixed),
            ring_bytes=ring_bytes_for(self.parameters, config, streams=False) + staging_bytes,
        )

    def _fixed_units(self, config: Config) -> set[str]:
        """Units that the options have updated on the device, so that their weights are there."""
        if config.plan is not None:
            return {row.unit_name for row in config.plan.rows if row.placement is not Placement.CPU}
        return {unit.name for unit in self.units[: config.k]} if config.k != "auto" else set()

    def _states_bytes(self, config: Config, fixed: set[str]) -> int:
        if fixed:
            rows = (row for unit in self.units if unit.name in fixed for row in unit.rows)
            return sum(self.sizes[row].device_bytes + self.sizes[row].gradient_bytes for row in rows)
        if config.plan is not None or config.k != "auto" or config.gpu_states == "auto":
            return 0  # what is left is given to them once a step has run
        all_bytes = sum(size.device_bytes for size in self.sizes)
        return int(config.gpu_states * all_bytes) if isinstance(config.gpu_states, float) else min(config.gpu_states, all_bytes)


def _counted(model: Any, optimizer: Any) -> _Counted | None:
    """None for what cannot be trained."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        return None
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) in group_of and p.numel() > 0}
    if not trained:
        return None
    update = kernel_update(optimizer)
    tables = [MASTER_ALONE if update is None else update.table.under(group_of[id(p)]) for p in trained.values()]
    sizes = [RowSize(p.numel(), p.element_size(), table) for p, table in zip(trained.values(), tables, strict=True)]
    return _Counted(list(trained.values()), sizes, group_units(model, list(trained)))


def _may_be_streamed(parameter: nn.Parameter) -> bool:
    return may_wait(parameter) if parameter.is_meta else may_stream(parameter)


def _hindrance(optimizer: torch.optim.Optimizer, config: Config, needs: DeviceNeeds) -> str | None:
    """Why weights of this model cannot be streamed; None where they can."""
    update = kernel_update(optimizer)
    if update is None or any(update.table.under(group).tie is None for group in optimizer.param_groups):
        return f"that is for AdamW and Adam, and the optimizer is {type(optimizer).__name__}"
    if config.engine in ("torch", "deepspeed"):
        return f"that is for the native engine, and engine={config.engine!r} was given"
    if config.speculate is True:
        return "speculate=True was given, and no update of a streamed weight begins before step()"
    if config.options.get("cpp_wrapper"):
        return "the option cpp_wrapper of Inductor was given"
    if count_of_ranks(config.process_group) > 1:
        return 'several ranks train this model; weights="sharded" leaves a part of them on each'
    if not needs.streamed_bytes:
        return "no weight is a bf16 matrix that the CPU updates, with memory of its own"
    try:
        libraries.library(libraries.SOURCES)
        can_put()
    except EngineError as error:
        return f"that needs a C++ compiler ({error})"
    return None
