"""Steps whose gradients are not finite: computed as in torch, or left out, counted and told of.

    allow   the update computes with the values
    skip    a number on the device says whether any value is NaN or infinite, and the engine leaves
            the step out where it says so
    raise   the same, and the loop is told, when the number has come

Of a pipeline's stages all leave a step out where one has to: what one has found is shared before
the commit (session/rank_stages.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hytrain_fx.config import OnNonfinite
from hytrain_fx.errors import EngineError, NonFiniteGradientError
from hytrain_fx.gradients.finiteness import FiniteCheck, Finiteness
from hytrain_fx.gradients.slots import GradientSlots, nobody_asks
from hytrain_fx.gradients.sources import is_in_slot
from hytrain_fx.gradients.standin import GradStandIn
from hytrain_fx.runtime.arithmetic import AT_REST
from hytrain_fx.runtime.engine import CommitItem, Engine
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.session.commit import CommitBuilder
from hytrain_fx.weights.gathered import GatheredWeights


class FiniteSteps:
    """Commits the steps of one session.

    count           steps left out so far because a gradient was not finite
    last            the number of the last of them, from 1
    reads_at_once   whether reading a number on the device waits for nothing: the model is on the
                    CPU
    share           gives from what this stage has found what any stage has, 0-dim fp32 on the
                    device, not 0 where a gradient is not finite. None: the model is no stage
    error_of        gives from the error that this stage has of the step before the one that its
                    step() raises: all stages of a rank raise. None: the model is no stage
    gathered        weights that every rank updates in shards: of all ranks the same, or of none
    """

    def __init__(
        self, engine: Engine, builder: CommitBuilder, states: StateStore, slots: GradientSlots, gathered: GatheredWeights | None = None, *,
        reads_at_once: bool
    ) -> None:
        self.count = 0
        self.last = 0
        self.reads_at_once = reads_at_once
        self.share: Callable[[torch.Tensor | None], torch.Tensor] | None = None
        self.error_of: Callable[[NonFiniteGradientError | None], NonFiniteGradientError | None] | None = None
        self._mode: OnNonfinite = "allow"
        self._engine = engine
        self._builder = builder
        self._states = states
        self._slots = slots
        self._gathered = gathered
        self._finiteness = Finiteness(states.copies, slots.shards)
        self._error: NonFiniteGradientError | None = None
        # of a step without gradients here: its number, and whether any stage had some not finite
        self._elsewhere: tuple[int, torch.Tensor] | None = None

    def use(self, mode: OnNonfinite) -> None:
        """What to do from now on. No gradient may be there."""
        self._mode = mode
        self._slots.on_offload = nobody_asks if mode == "allow" else self._finiteness.note

    def commit(
        self, items: Sequence[CommitItem], groups: Iterable[Mapping[str, Any]], skip: torch.Tensor | None, number: int
    ) -> Sequence[CommitItem]:
        """Commit step `number`, and give the items that the engine has taken.

        None where it is known now that the step is left out.

        skip   GradScaler's, 0-dim fp32 on the device: where it is not 0 it leaves the step out,
               which is not counted here

        Raises RankError, and nothing has changed, where another rank updates other parameters.
        """
        if self._gathered:
            self._gathered.before_updates(self._builder.parameters_of(items))
        check = self._checked(items, number)
        if check is not None and not self._engine.can_skip:
            if bool(check.any):
                self._left_out(check, number)
                self._builder.left_out += 1
                return ()
            check = None
        items = self._builder.with_steps(groups, items)
        if check is None:
            self._take(items, skip)
            if skip is not None:
                self._builder.doubt(items, self._engine.skipped)
            return items
        self._take(items, check.any if skip is None else torch.maximum(skip, check.any))
        by_scaler = None if skip is None else skip.clone()  # GradScaler writes to its own later
        self._builder.doubt(items, partial(self._was_left_out, check, by_scaler, number))
        return items

    def _checked(self, items: Sequence[CommitItem], number: int) -> FiniteCheck | None:
        if self._mode == "allow":
            return None
        check = self._finiteness.check(items) if items else None
        if self.share is None:
            return check
        any_stage = self.share(None if check is None else check.any)  # others wait for it, also where nothing is here
        if check is None:
            self._elsewhere = number, any_stage
            return None
        return replace(check, any=any_stage)

    def found_now(self, gradients: Iterable[tuple[int, torch.Tensor]]) -> torch.Tensor | None:
        """Whether any of these `.grad`, by row, is not finite: 0-dim fp32 on the device, 1 or 0.

        None without gradients, and with "allow". For what is asked before the stage's own step().
        """
        items = [] if self._mode == "allow" else [_as_item(row, grad, self._slots) for row, grad in gradients]
        return self._finiteness.check(items).any if items else None

    def _take(self, items: Sequence[CommitItem], skip: torch.Tensor | None) -> None:
        if skip is None:
            self._engine.commit(items)
        else:
            self._engine.commit_unless(items, skip)
        self._builder.committed(items)

    def _was_left_out(self, check: FiniteCheck, by_scaler: torch.Tensor | None, number: int) -> bool:
        skipped = self._engine.skipped()
        if skipped and (by_scaler is None or not bool(by_scaler)):
            self._left_out(check, number)
        return skipped

    def _left_out(self, check: FiniteCheck | None, number: int) -> None:
        self.count += 1
        self.last = number
        if self._mode == "raise":
            row = None if check is None else check.first()
            elsewhere = "on another rank" if self.share is None else "in another stage"
            of = elsewhere if row is None else f"among them that of {self._slots.name(self._states.pieces.parameter(row))}"
            self._error = NonFiniteGradientError(
                f"the gradients of step {number} hold NaN or infinite values ({of}), so it was left out: weights, "
                f"optimizer states and step counts are those before step {number}, and training may go on. Look at the loss before "
                'step(), or leave such steps out without an error: on_nonfinite="skip"'
            )

    def raise_told(self, *, wait: bool) -> None:
        """Raises NonFiniteGradientError once for a step that was left out, where that is known.

        Of a pipeline's stage only by waiting: all ranks raise at the same step() then, and none in
        a forward, where others would wait for it.

        wait   until it is known of the last step
        """
        if self._mode != "raise" or (self.share is not None and not wait):
            return
        error = self.take_error(wait=wait)
        if self.error_of is not None and not self.reads_at_once:  # else it was told within the step that was left out
            error = self.error_of(error)
        if error is not None:
            raise error

    def take_error(self, *, wait: bool = True) -> NonFiniteGradientError | None:
        """The error of a step that was left out, once. `wait`: as of `raise_told`."""
        if self._mode == "raise" and (wait or self._engine.knows_skipped()):
            self._builder.settle_steps()
        if wait and self._elsewhere is not None:  # the other stages raise, so this one does
            (number, any_stage), self._elsewhere = self._elsewhere, None
            if bool(any_stage):
                self._left_out(None, number)
        error, self._error = self._error, None
        return error

    def in_words(self, steps_done: int) -> str | None:
        """How many steps were left out, in a sentence; None where none was.

        Waits for the device, except with "allow".
        """
        if self._mode == "allow":
            return None
        with suppress(EngineError):
            self._builder.settle_steps()
        if self.count == 0:
            return None
        return (f"{self.count} of {steps_done} steps were left out because gradients held NaN or infinities "
                f'(on_nonfinite="{self._mode}"); the last was step {self.last}')


def _as_item(row: int, grad: torch.Tensor, slots: GradientSlots) -> CommitItem:
    """What a commit would have of this gradient, as far as a check reads it."""
    if not isinstance(grad, GradStandIn):
        return CommitItem(row, AT_REST, grad)
    if is_in_slot(grad, slots, row):
        return CommitItem(row, AT_REST, None, factors=grad.factors)
    real = grad.materialized
    return CommitItem(row, AT_REST, grad.grad_state.copy_home() if real is None else real)
