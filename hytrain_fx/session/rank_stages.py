"""The stages of one pipeline that this process has: what they do together with the other ranks.

    add_up_ties    gradients of a weight that several stages have
    share_inf      an inf that a GradScaler finds in one stage leaves the step out in all of them
    share_found    the same of what `on_nonfinite` finds
    norm           of gradients of all stages

Each is one collective over the pipeline's ranks, before a commit. The ranks have a group for them
from the first one on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import distributed

from hytrain_fx.errors import RankError
from hytrain_fx.runtime.ranks import Ranks
from hytrain_fx.session.session import Session
from hytrain_fx.session.tied_weights import TiedWeight
from hytrain_fx.torch_private.optimizers import found_infs
from hytrain_fx.torch_private.tensors import get_grad


class RankStages:
    """Of one schedule on this rank. A schedule like 1F1B has one stage here, others several.

    group    ranks of the pipeline; None: the default group
    device   of the stages
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._optimizers: weakref.WeakKeyDictionary[Session, weakref.ref[torch.optim.Optimizer]] = weakref.WeakKeyDictionary()
        self._ties: list[tuple[weakref.ref[Session], TiedWeight]] = []  # in an order that all ranks have
        self._shared: Sequence[torch.Tensor] = ()  # what a GradScaler has found in this step, the same on all ranks
        self._untold: weakref.WeakKeyDictionary[Session, _Found] = weakref.WeakKeyDictionary()

    @cached_property
    def ranks(self) -> Ranks:
        """Those of the pipeline. Every one of them must ask for the first time together.

        Raises RankError where one has not come within the group's time limit.
        """
        try:
            return Ranks(self._whole_group, self._device)
        except RuntimeError as error:  # torch's own, of the store or the backend
            why = str(error).partition("\n")[0]
            raise RankError(
                f"the ranks of this pipeline have not all come to what their stages do together ({why}). Every rank calls clip_grad_norm_, "
                "a GradScaler's step and tie_weights, and on_nonfinite is the same in all. A stage with nothing to train does none of it: "
                'then use on_nonfinite="allow", and clip each stage by itself'
            ) from error

    def some(self, ranks: Sequence[int]) -> Ranks:
        """Some of the pipeline's ranks, this one among them. Each of them must ask."""
        of_all = distributed.get_process_group_ranks(self._whole_group)
        return Ranks(distributed.new_group([of_all[rank] for rank in ranks], use_local_synchronization=True), self._device)

    @property
    def _whole_group(self) -> Any:
        return distributed.group.WORLD if self._group is None else self._group

    def add(self, session: Session, optimizer: torch.optim.Optimizer) -> None:
        """A stage has been compiled."""
        self._optimizers[session] = weakref.ref(optimizer)
        session.finite_steps.share = partial(self.share_found, weakref.ref(session))

    # ---- weights that several stages have ----

    def tie(self, session: Session, weight: TiedWeight) -> None:
        """A weight of this session's stage is in other stages too."""
        self._ties.append((weakref.ref(session), weight))

    def ties(self, session: Session) -> list[TiedWeight]:
        """Of this session's stage."""
        return [weight for of, weight in self._ties if of() is session]

    def names(self, session: Session) -> Sequence[str]:
        """What its parameters are called in checkpoints, by row."""
        names = list(session.table.names)
        for weight in self.ties(session):
            names[weight.row] = weight.saved_as
        return names

    def add_up_ties(self) -> None:
        """Each `.grad` of a weight that several stages have becomes their sum.

        Called before anything reads the gradients of a step. Raises as `TiedWeight.add_up` does.
        """
        for of, weight in self._ties:
            session = of()
            if session is not None and not session.closed:
                weight.add_up()

    def dropped(self, session: Session) -> None:
        """The gradients of this session's stage are taken, or gone."""
        for weight in self.ties(session):
            weight.dropped()

    # ---- what all stages have in common ----

    def share_inf(self, scaler: torch.amp.GradScaler) -> None:
        """What this GradScaler has found in any stage it has found in all of them.

        Once in a step, whichever optimizer of this rank is stepped first. Raises RankError.
        """
        self.add_up_ties()
        open_ones = [ref() for session, ref in self._optimizers.items() if not session.closed]
        found = [of for optimizer in open_ones if optimizer is not None for of in found_infs(scaler, optimizer)]
        shared = set(map(id, self._shared))
        if found and all(id(of) in shared for of in found):
            return
        own = torch.zeros(1, dtype=torch.float32, device=self._device)
        for of in found:
            own = torch.maximum(own, of.reshape(1).to(self._device, non_blocking=True))
        any_stage = self.ranks.of_each(own, "whether the gradients of all stages are finite").amax()
        for of in found:
            of.fill_(any_stage)
        self._shared = found

    def share_found(self, of: weakref.ref[Session], own: torch.Tensor | None) -> torch.Tensor:
        """Whether any stage has gradients that are not finite: 0-dim fp32, 0 where none has.

        of    the session that steps
        own   what it has found; None without gradients

        Once in a step, whichever optimizer of this rank is stepped first; it looks at the gradients
        of the rank's other stages too. All stages need the same `on_nonfinite`, or none "allow".
        Raises RankError.
        """
        session = of()
        assert session is not None  # it steps
        before = self._untold.pop(session, None)
        if before is not None and before.backwards == session.nodes.runs["backward_end"]:
            return before.any_stage if own is None else torch.maximum(before.any_stage, own)
        others = [other for other in self._optimizers if other is not session and not other.closed]
        found = [own, *(other.finite_steps.found_now(_gradients(other)) for other in others)]
        here = torch.zeros(1, dtype=torch.float32, device=self._device)
        for one in found:
            here = here if one is None else torch.maximum(here, one)
        any_stage = self.ranks.of_each(here, "whether the gradients of all stages are finite (on_nonfinite, the same in all)").amax()
        self._untold.update((other, _Found(any_stage, other.nodes.runs["backward_end"])) for other in others)
        return any_stage

    def norm(self, own: torch.Tensor, order: float) -> torch.Tensor:
        """The norm over all stages, 0-dim fp32, of the norms of each rank's gradients.

        Taken in fp64, in the order of the ranks, so every rank has the same bits. Raises RankError.
        """
        of_ranks = self.ranks.of_each(own.to(self._device, torch.float64).reshape(1), "the norm of the gradients of all stages")
        total: torch.Tensor = torch.linalg.vector_norm(of_ranks, order).float()
        return total


class _Found(NamedTuple):
    """What all stages have agreed on before a session of this rank has come to its step().

    backwards   how many it had made by then: after another one it no longer holds
    """

    any_stage: torch.Tensor
    backwards: int


def _gradients(session: Session) -> Iterator[tuple[int, torch.Tensor]]:
    return ((row, grad) for row, p in enumerate(session.table.parameters) if (grad := get_grad(p)) is not None)


_OF_SCHEDULES: weakref.WeakKeyDictionary[Any, RankStages] = weakref.WeakKeyDictionary()


def stages_with(session: Session) -> RankStages | None:
    """The stages of this rank in the schedule that the session's model is a stage of.

    None where it is no stage.
    """
    stage = session.config.pipeline
    schedule = None if stage is None or stage.made_in is None else stage.made_in()
    if schedule is None:
        return None
    if schedule not in _OF_SCHEDULES:
        _OF_SCHEDULES[schedule] = RankStages(stage.group, session.table.device)
    return _OF_SCHEDULES[schedule]


def parameters_counted(stages: RankStages, sessions: Iterable[Session], parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """These parameters, without copies of a weight that another stage counts."""
    left_out = {id(weight.parameter) for session in sessions for weight in stages.ties(session) if not weight.is_counted}
    return [parameter for parameter in parameters if id(parameter) not in left_out]
