"""What a loop calls for all stages of a pipeline at once. Every rank of the pipeline calls it.

    clip_grad_norm_    one norm, one factor
    tie_weights        a weight that is in several stages trains as one
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hytrain_fx.errors import ConfigError, UnsupportedError
from hytrain_fx.ir.states import MOMENTS
from hytrain_fx.runtime.rank_errors import told_to_ranks
from hytrain_fx.session.call_gate import find_session
from hytrain_fx.session.rank_stages import RankStages, parameters_counted, stages_with
from hytrain_fx.session.session import Session
from hytrain_fx.session.tied_weights import TiedWeight, require_same_states, states_in_words

Stages = nn.Module | Iterable[nn.Module]


def clip_grad_norm_(stages: Stages, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """torch's `clip_grad_norm_` over all stages of a pipeline: gives their norm, 0-dim fp32.

    stages   this rank's compiled stage; all of them where it has several

    Called after the schedule's step, on every rank. With a GradScaler call `scaler.unscale_` of
    each optimizer first. Nothing waits for the device. Raises UnsupportedError for a model that is
    not compiled as a stage, RankError where another rank does not call it.
    """
    models, sessions, here = stages_of(stages)
    here.add_up_ties()
    counted = parameters_counted(here, sessions, (p for model in models for p in model.parameters()))
    own = get_total_norm([p.grad for p in counted if p.grad is not None], norm_type)
    total = here.norm(own, norm_type)
    for model in models:
        clip_grads_with_norm_(model.parameters(), max_norm, total)
    return total


def tie_weights(stages: Stages, names: Iterable[Sequence[str]]) -> None:
    """Train a weight that several stages have as one: an embedding, and the head tied to it.

        hytrain_fx.tie_weights(stage.submod, [("embed.weight", "head.weight")])

    stages   this rank's compiled stage; all of them where it has several
    names    for each such weight: the names that it has in the stages. Every rank gives the same;
             checkpoints of states call it by the first one

    Called once, after `compile`, on every rank of the pipeline. Copies get the values of the first
    rank's. At each step their gradients are added up over the ranks, before they are clipped or
    used; until then `.grad` is what each stage has made. Then every copy has the same update.

    Raises ConfigError, on every rank, where a weight is not in two ranks' stages, or its copies,
    their options or states differ; UnsupportedError for two copies on one rank, a weight that is
    tied already, moments in bf16, a weight that is not contiguous, and for a model that is not
    compiled as a stage. States that are loaded later are compared in the next step.
    """
    _, sessions, here = stages_of(stages)
    with told_to_ranks("tie_weights", lambda: here.ranks):
        asked = [(of,) if isinstance(of, str) else tuple(of) for of in names]
        found = [_copies_here(sessions, of) for of in asked]
        own = [_told(of, copies, here) for of, copies in zip(asked, found, strict=True)]
    here.ranks.require_alike("names of tied weights", tuple(map(str, asked)))
    told = here.ranks.of_all("the copies of tied weights", own)
    all_holders = [_holders(of, [rank[number] for rank in told]) for number, of in enumerate(asked)]
    for of, copies, holders in zip(asked, found, all_holders, strict=True):
        for session, row in copies:
            weight = TiedWeight(row, of[0], here.some(holders), holders, session)
            weight.begin_alike()
            here.tie(session, weight)


def stages_of(stages: Stages) -> tuple[list[nn.Module], list[Session], RankStages]:
    """These compiled models, their sessions, and what they have in common.

    Raises UnsupportedError for a model that is not compiled as a stage, or stages of two schedules.
    """
    models = [stages] if isinstance(stages, nn.Module) else list(stages)
    sessions, found = list[Session](), list[RankStages]()
    for model in models:
        session = find_session(model)
        here = None if session is None else stages_with(session)
        if session is None or here is None:
            raise UnsupportedError(f"this {type(model).__name__} is not compiled as a stage of a pipeline: "
                                   "hytrain_fx.compile(stage.submod, optimizer, pipeline=schedule)")
        sessions.append(session)
        found.append(here)
    if len(set(map(id, found))) != 1:
        raise UnsupportedError(f"expected the stages of one schedule, found those of {len(set(map(id, found)))}")
    return models, sessions, found[0]


def _copies_here(sessions: Iterable[Session], names: Sequence[str]) -> list[tuple[Session, int]]:
    return [(session, row) for session in sessions for row, name in enumerate(session.table.names) if name in names]


class _Told(NamedTuple):
    """What a rank tells the others of its copy.

    form      what copies must have in common; None without a copy
    problem   why it cannot be tied
    states    its moments and steps, in words
    """

    form: str | None
    problem: str | None = None
    states: str = ""


def _told(names: Sequence[str], copies: Sequence[tuple[Session, int]], here: RankStages) -> _Told:
    if not copies:
        return _Told(None)
    if len(copies) > 1:
        return _Told("", f"{' and '.join(names)} are both on one rank: weights are tied between stages of different ranks")
    ((session, row),) = copies
    parameter, name = session.table.parameters[row], session.table.names[row]
    group = next(group for group in session.groups if any(p is parameter for p in group["params"]))
    options = {key: value for key, value in sorted(group.items()) if key not in ("params", "param_names")}
    form = f"{tuple(parameter.shape)} {parameter.dtype} {options}"
    if any(weight.row == row for weight in here.ties(session)):
        return _Told(form, f"{name} is tied already; name all its copies in one call, and call tie_weights once")
    if not parameter.is_contiguous():
        return _Told(form, f"{name} is not contiguous; make it so before compile()")
    if group.get(MOMENTS) == "bf16":
        return _Told(form, f"{name} is in a parameter group with moments in bf16, and chance would round each copy's in another way; "
                           'put it into a group with moments="fp32"')
    return _Told(form, states=states_in_words(session, row))


def _holders(names: Sequence[str], told: Sequence[_Told]) -> list[int]:
    """The ranks that have a copy. Raises, on every rank, what `tie_weights` does."""
    problem = next((of.problem for of in told if of.problem is not None), None)
    if problem is not None:
        raise UnsupportedError(f"tie_weights: {problem}")
    holders = [rank for rank, of in enumerate(told) if of.form is not None]
    if len(holders) < 2:
        raise ConfigError(f"tie_weights: expected {' or '.join(names)} in stages of two ranks or more, found it on {len(holders)}")
    first, other = holders[0], next((rank for rank in holders if told[rank].form != told[holders[0]].form), None)
    if other is not None:
        raise ConfigError(f"tie_weights: copies of {names[0]} differ: {told[first].form} on rank {first}, "
                          f"{told[other].form} on rank {other}")
    require_same_states(names[0], {rank: told[rank].states for rank in holders})
    return holders
