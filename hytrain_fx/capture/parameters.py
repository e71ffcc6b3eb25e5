"""Which parameters are managed, checked before anything is allocated.

Here they get row numbers, names and optimizer groups.

A managed parameter requires grad, is in the optimizer, and has elements. Rows count them in
`model.named_parameters()` order, so the same model gives the same numbers in every process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from hytrain_fx.capture.parallel_wrappers import require_unwrapped
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.shard import Shard, owners, shard_of
from hytrain_fx.runtime.states.store import is_dense
from hytrain_fx.runtime.updates import kernel_update

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ManagedParameter(nn.Parameter):
    """What parameters of a compiled model are derived from outside the compiled call.

    `weights.guard` has what they do.
    """


@dataclass(frozen=True, eq=False)
class ParameterTable:
    """Managed parameters by row.

    row_of   maps `id(parameter)` to the row
    shards   by row of a parameter that is updated in shards, each by another rank: this rank's
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    row_of: dict[int, int]
    device: torch.device
    shards: Mapping[int, Shard] = field(default_factory=dict)

    @cached_property
    def homes(self) -> tuple[torch.Tensor, ...]:
        """By row: the form of what is updated here, the parameter's or its shard's.

        Only for shape, strides and dtype: those of shards have no memory.
        """
        homes = list[torch.Tensor](self.parameters)
        for row, shard in self.shards.items():
            homes[row] = torch.empty(shard.end - shard.begin, dtype=homes[row].dtype, device="meta")
        return tuple(homes)

    def __len__(self) -> int:
        return len(self.names)

    def shared_among(self, ranks: int, rank: int, *, whole: bool = False) -> ParameterTable:
        """The same, each large parameter updated in shards by so many ranks.

        whole   each is updated by one rank instead, its owner
        """
        found = {row: shard_of(parameter.shape, rank, ranks) for row, parameter in enumerate(self.parameters)}
        shards = {row: shard for row, shard in found.items() if shard is not None}
        if whole:
            owner_of = owners({row: self.parameters[row].nbytes for row in shards}, ranks)
            shards = {row: replace(shard, owner=owner_of[row]) for row, shard in shards.items()}
        return replace(self, shards=shards)

    def is_elsewhere(self, row: int) -> bool:
        """Whether another rank updates all of this parameter."""
        return row in self.shards and self.shards[row].is_elsewhere

    @cached_property
    def has_owners(self) -> bool:
        """Whether each large parameter is updated by one of several ranks."""
        return any(shard.owner is not None for shard in self.shards.values())

    @property
    def part_in_words(self) -> str:
        """What one of several ranks updates, for `explain`."""
        if not self.shards:
            return "every parameter"
        if self.has_owners:
            return "the matrices that it owns and keeps their states, and the next forward gets new weights from their owners"
        return "its shard of every matrix and keeps that shard's states, and the next forward gathers the new weights"


def build_table(model: nn.Module, optimizer: torch.optim.Optimizer) -> ParameterTable:
    """Number the managed parameters of a model.

    Raises UnsupportedError, which says what was found and what to do.
    """
    _check_kinds(model, optimizer)
    named = dict(model.named_parameters())
    if not named:
        raise UnsupportedError("the model has no parameters; there is nothing to train")
    in_model = {id(p): name for name, p in named.items()}
    in_optimizer = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [tuple(p.shape) for p in in_optimizer if id(p) not in in_model]
    if foreign:
        raise UnsupportedError(
            f"the optimizer holds {len(foreign)} parameter(s) that are not the model's (the first has shape {foreign[0]}); "
            "make the optimizer from this model's parameters(), after the last call that replaces them (.to(dtype), load)"
        )
    optimized = {id(p) for p in in_optimizer}
    managed = {name: p for name, p in named.items() if p.requires_grad and id(p) in optimized and p.numel() > 0}
    if not managed:
        raise UnsupportedError("no parameter of the model requires grad and is in the optimizer; there is nothing to train. A model that "
                               "is trained later (a GAN's discriminator): freeze it after hytrain_fx.compile()")
    device = next(iter(managed.values())).device
    counts = Counter(map(id, in_optimizer))
    for name, parameter in managed.items():
        _check_parameter(name, parameter, device)
        if counts[id(parameter)] > 1:
            raise listed_twice(name)
    parameters = tuple(managed.values())
    return ParameterTable(tuple(managed), parameters, {id(p): row for row, p in enumerate(parameters)}, device)


def listed_twice(name: str) -> UnsupportedError:
    """The error for a parameter of this name that groups list twice."""
    return UnsupportedError(f"{name} is twice in the optimizer's parameter groups: torch.optim would update it twice in each step, with "
                            "the same gradient; list it once (model.parameters() gives a tied weight once), and take it out of the group "
                            "that it leaves")


def _check_kinds(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    require_unwrapped(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    within = getattr(optimizer, "optimizer", None)
    if isinstance(within, torch.optim.Optimizer):
        raise UnsupportedError(f"optimizer is a {type(optimizer).__name__} around a {type(within).__name__}; "
                               "compile first, then wrap what is returned (accelerator.prepare, for one)")
    update = kernel_update(optimizer)
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise UnsupportedError("differentiable=True needs the update inside autograd; make the optimizer without it")
        if update is not None:  # a dry step: an option that no step can take shows now
            update.scalars({**optimizer.defaults, **group}, 1, False)


def _check_parameter(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    if isinstance(parameter, ManagedParameter):
        raise UnsupportedError(f"{name} is a parameter of another model that hytrain_fx.compile() has taken over, or of this one inside "
                               "a wrapper; call hytrain_fx.close() with that one first")
    if type(parameter) is not nn.Parameter:
        raise UnsupportedError(f"{name} is a {type(parameter).__name__}; supported are plain torch.nn.Parameter objects")
    if parameter.device != device:
        raise UnsupportedError(f"{name} is on {parameter.device}, others on {device}; one device for all trained parameters is supported")
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"{name} is on {device}; supported are CPU and CUDA devices (move the model before compile)")
    if parameter.dtype not in _DTYPES:
        raise UnsupportedError(f"{name} is {parameter.dtype}; supported are float32, bfloat16 and float16")
    if parameter.layout != torch.strided or not is_dense(parameter):
        raise UnsupportedError(f"{name} has strides {parameter.stride()} for shape {tuple(parameter.shape)}; expected a dense tensor")
