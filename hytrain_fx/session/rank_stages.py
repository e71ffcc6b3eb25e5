"""The stages of one pipeline that this process has: what they do together with the other ranks.

    add_up_ties    gradients of a weight that several stages have
    share_inf      an inf that a GradScaler finds in one stage leaves the step out in all of them
    share_found    the same of what `on_nonfinite` finds
    error_of       stages of this rank hear of such a step together
    norm           of gradients of all stages

All but `error_of` are one collective over the pipeline's ranks, before a commit. The ranks have a
group for them from the first one on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import distributed

from hytrain_fx.errors import NonFiniteGradientError, RankError
from hytrain_fx.gradients.loss_scale import is_watched
from hytrain_fx.runtime.ranks import Ranks
from hytrain_fx.session.session import Session
from hytrain_fx.session.tied_weights import TiedWeight
from hytrain_fx.torch_private.optimizers import found_infs, iteration_of
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
        self._saved_as: weakref.WeakKeyDictionary[Session, dict[int, str]] = weakref.WeakKeyDictionary()  # by row: of its ties
        self._iteration: object = None  # of the GradScaler that was shared last
        self._inf = torch.zeros((), device=device)  # what it has found then, the same on all ranks
        self._untold: weakref.WeakKeyDictionary[Session, _Found] = weakref.WeakKeyDictionary()
        self._unheard: weakref.WeakKeyDictionary[Session, _Unheard] = weakref.WeakKeyDictionary()

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
        some = Ranks(distributed.new_group([of_all[rank] for rank in ranks], use_local_synchronization=True), self._device)
        some.all_have_compiled()  # they meet at the end of a step
        return some

    @property
    def _whole_group(self) -> Any:
        return distributed.group.WORLD if self._group is None else self._group

    def add(self, session: Session, optimizer: torch.optim.Optimizer) -> None:
        """A stage has been compiled."""
        self._optimizers[session] = weakref.ref(optimizer)
        session.finite_steps.share = partial(self.share_found, weakref.ref(session))
        session.finite_steps.error_of = partial(self.error_of, weakref.ref(session))

    def closed(self, session: Session) -> None:
        """This stage trains no more. Its checkpoints keep their names."""
        self._ties = [(of, weight) for of, weight in self._ties if of() not in (session, None)]

    # ---- weights that several stages have ----

    def tie(self, session: Session, weight: TiedWeight) -> None:
        """A weight of this session's stage is in other stages too."""
        self._ties.append((weakref.ref(session), weight))
        self._saved_as.setdefault(session, {})[weight.row] = weight.saved_as

    def ties(self, session: Session) -> list[TiedWeight]:
        """Of this session's stage."""
        return [weight for of, weight in self._ties if of() is session]

    def names(self, session: Session) -> Sequence[str]:
        """What its parameters are called in checkpoints, by row."""
        names = list(session.table.names)
        for row, name in self._saved_as.get(session, {}).items():
            names[row] = name
        return names

    def loaded(self, session: Session) -> None:
        """States of this session's stage were loaded: its ties compare theirs in the next step."""
        for weight in self.ties(session):
            weight.is_loaded = True

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

    def share_inf(self, stepped: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """What this GradScaler has found in any stage it has found in all of them.

        Once in an iteration of it, whichever optimizer of this rank is stepped first. It looks at
        the gradients of the others, too, and unscales those of the stepped one alone: others may
        step later, after more backwards. Raises RankError.
        """
        iteration = iteration_of(scaler)
        if iteration is not self._iteration:
            self._share_first(stepped, scaler)
            self._iteration = iteration
        for of in found_infs(scaler, stepped, unscales=True):
            of.copy_(torch.maximum(of, self._inf.to(of.device, non_blocking=True).reshape(of.shape)))

    def _share_first(self, stepped: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        found = ((session, ref()) for session, ref in self._optimizers.items() if not session.closed)
        open_ones = {session: optimizer for session, optimizer in found if optimizer is not None}
        if any(session.config.on_nonfinite != "allow" for session in open_ones):
            self._require_same_hooks(open_ones)
        self.add_up_ties()
        here = torch.zeros(1, dtype=torch.float32, device=self._device)
        for optimizer in open_ones.values():
            for of in found_infs(scaler, optimizer, unscales=optimizer is stepped):
                here = torch.maximum(here, of.reshape(1).to(self._device, non_blocking=True))
        self._inf = self.ranks.of_each(here, "whether the gradients of all stages are finite").amax()

    def _require_same_hooks(self, optimizers: Mapping[Session, torch.optim.Optimizer]) -> None:
        """Raises RankError where an inf would have ranks part: some call `step()`, others do not.

        `step()` shares what `on_nonfinite` has found.
        """
        waits = [is_watched(optimizer) or not session.engine.can_skip for session, optimizer in optimizers.items()]
        self.ranks.all_have_compiled()
        self.ranks.require_alike('hooks on step() of optimizers with a GradScaler and on_nonfinite="skip" or "raise"',
                                 ("hooks" if all(waits) else "some" if any(waits) else "none",))

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
        stepped, before = self._stepped_before(session), self._untold.pop(session, None)
        if stepped and before is not None:
            return before.any_stage if own is None else torch.maximum(before.any_stage, own)
        others = [other for other in self._optimizers if other is not session and not other.closed]
        found = [own, *(other.finite_steps.found_now(_gradients(other)) for other in others)]
        here = torch.zeros(1, dtype=torch.float32, device=self._device)
        for one in found:
            here = here if one is None else torch.maximum(here, one)
        any_stage = self.ranks.of_each(here, "whether the gradients of all stages are finite (on_nonfinite, the same in all)").amax()
        self._untold.update((other, _Found(any_stage, other.nodes.backwards)) for other in others)
        return any_stage

    def error_of(self, of: weakref.ref[Session], own: NonFiniteGradientError | None) -> NonFiniteGradientError | None:
        """What the step() of a session raises before it commits, of the step before.

        of    the session
        own   its own error of that step

        The first stage of a rank that steps asks the others. Where it raises, the others do in
        the same iteration: a loop that catches the error of each does not step one of them alone.
        They do not in the next one, which one that left at the first error would do.
        """
        session = of()
        assert session is not None  # it steps
        for other in [other for other, unheard in self._unheard.items() if unheard.told() is session]:
            del self._unheard[other]  # it steps again
        unheard = self._unheard.pop(session, None)
        if unheard is not None and unheard.backwards == session.nodes.backwards:
            return unheard.error
        if self._stepped_before(session):
            return own  # that one has asked; what it has found of this step is not waited for
        others = [other for other in self._optimizers if other is not session and not other.closed]
        errors = [other.finite_steps.take_error() for other in others]
        error = own or next(filter(None, errors), None)
        if error is not None:
            self._unheard.update((other, _Unheard(found or NonFiniteGradientError(*error.args), of, other.nodes.backwards))
                                 for other, found in zip(others, errors, strict=True))
        return error

    def _stepped_before(self, session: Session) -> bool:
        """Whether another stage of this rank has come to its step() since the last backward."""
        before = self._untold.get(session)
        return before is not None and before.backwards == session.nodes.backwards

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


class _Unheard(NamedTuple):
    """The error that a stage raises since another one of its rank has.

    error       not the one that was raised: its traceback would keep what the loop had then
    told        the session that has raised
    backwards   how many this one had made by then: after another one it does not raise
    """

    error: NonFiniteGradientError
    told: weakref.ref[Session]
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
