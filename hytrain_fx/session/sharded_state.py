"""Optimizer states as `torch.distributed.checkpoint` saves and loads them: each rank its shards.

    {"state": {name: {"step": ..., "exp_avg": ..., "exp_avg_sq": ..., "master": ...}},
     "param_groups": [{"params": [names], "lr": ..., ...}]}

A tensor whose shards are slices of its first dimension is a DTensor, and nothing of it is gathered.
A parameter that has an owner has its entry, whole, on that rank alone, under the optimizer's own
names. Others are whole on every rank. On one rank all are. So a checkpoint of any number of ranks
is loaded by any other, and one of a pipeline's stages by the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hytrain_fx.ir.shard import Shard
from hytrain_fx.session.session import Session
from hytrain_fx.session.state_dict import (
    check_row,
    load_options,
    load_row,
    own_entries,
    shaped,
    step_count,
    tell_of_rounding,
    whole_states,
)
from hytrain_fx.torch_private.tensors import without_torch_function


def sharded_states(session: Session, names: Sequence[str]) -> dict[str, Any]:
    """Copies on the CPU, by these names of the rows. The session must be drained.

    Raises RankError.
    """
    session.states.require_whole()
    session.follow_written_weights()
    steps = session.builder.steps
    if (own := own_entries(session)) is not None:
        return {"state": {name: own.read(row) for row, name in enumerate(names) if own.has(row)}, "param_groups": _groups(session, names)}
    # All of them, also before their first step: they are what a checkpoint fills.
    state = {name: {"step": step_count(steps[row]), **_tensors(session, row)} for row, name in enumerate(names)}
    return {"state": state, "param_groups": _groups(session, names)}


def load_sharded_states(session: Session, names: Sequence[str], saved: Mapping[str, Any], defaults: Collection[str]) -> None:
    """Write what `sharded_states` gave and a checkpoint has filled. The session must be drained.

    names      of its rows in the checkpoint
    defaults   names of the options that the optimizer has by itself

    Raises ValueError, and writes nothing, where groups do not match, or a state is missing or has
    another shape; RankError where another rank does not load.
    """
    found, groups = saved["state"], saved["param_groups"]
    _require_matching_groups(_groups(session, names), groups)
    for group, options in zip(session.groups, groups, strict=True):
        session.update.require_same_states(group, options)
    pairs = zip(session.groups, groups, strict=True)
    group_of = session.builder.groups_by_row([{**group, **options, "params": group["params"]} for group, options in pairs])
    entries = {row: found[name] for row, name in enumerate(names) if name in found}
    for row, entry in entries.items():
        check_row(session, row, entry, group_of[row])
    tell_of_rounding(session, entries)
    of_owners = _loaded_by_owners(session, entries)
    session.follow_written_weights()
    with session.states.loading(all_states=True):
        for group, options in zip(session.groups, groups, strict=True):
            load_options(group, options, defaults)
        for row in range(len(session.table)):
            load_row(session, row, _stepped(session, entries.get(row, {} if row in of_owners else None)))
    session.gather_loaded(range(len(session.table)))


def _tensors(session: Session, row: int) -> dict[str, Any]:
    parameter, shard = session.table.parameters[row], session.table.shards.get(row)
    with without_torch_function():
        sliced = shard is not None and _is_slice(shard, parameter)
        states = session.states.whole(row) if sliced else whole_states(session, row)
        found = states.named() | ({} if parameter.dtype == torch.float32 else {"master": states.master})
        if shard is None or not sliced:
            return {name: shaped(flat, parameter) for name, flat in found.items()}
        shape = (parameter.shape[0] // shard.ranks, *parameter.shape[1:])
        return {name: _dtensor(session, flat.to("cpu", copy=True).view(shape), parameter) for name, flat in found.items()}


def _dtensor(session: Session, part: torch.Tensor, parameter: torch.Tensor) -> Any:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as Slices

    assert session.ranks is not None
    return DTensor.from_local(part, session.ranks.mesh, [Slices(0)], run_check=False, shape=parameter.shape, stride=parameter.stride())


def _is_slice(shard: Shard, parameter: torch.Tensor) -> bool:
    """Whether the shards are equal slices of the first dimension."""
    return parameter.is_contiguous() and parameter.shape[0] % shard.ranks == 0 and shard.each * shard.ranks == shard.numel


def _groups(session: Session, names: Sequence[str]) -> list[dict[str, Any]]:
    name_of = {id(parameter): name for name, parameter in zip(names, session.table.parameters, strict=True)}
    return [{**{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
             "params": [name_of[id(parameter)] for parameter in group["params"] if id(parameter) in name_of]} for group in session.groups]


def _require_matching_groups(own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError where a parameter is in another group than in the checkpoint.

    The file has the groups of one rank. Where ranks are stages of a pipeline, these name the
    parameters of one stage.
    """
    if len(own) != len(saved):
        raise ValueError(f"the checkpoint has {len(saved)} parameter groups, this optimizer has {len(own)}")
    group_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
    for number, group in enumerate(own):
        for name in group["params"]:
            if group_of.get(name, number) != number:
                raise ValueError(f"{name} is in parameter group {group_of[name]} of the checkpoint, and in {number} of this optimizer")


def _loaded_by_owners(session: Session, rows: Collection[int]) -> Collection[int]:
    """Parameters that another rank updates, and of which it loads an entry. Raises RankError."""
    table, gathered = session.table, session.nodes.gathered
    if session.rule is None or gathered is None:
        return ()
    of_all = gathered.rows_of_all([row for row in rows if not table.is_elsewhere(row)])
    return set(filter(table.is_elsewhere, of_all))


def _stepped(session: Session, entry: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The entry; None for one of no step.

    Checkpoints of earlier versions do not fill such a one: its master is this run's.
    """
    return entry if session.rule is not None or entry is None or int(entry["step"]) else None
