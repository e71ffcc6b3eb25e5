"""Plans that several ranks try together.

A step takes as long as that of the slowest rank. So what one rank tries alone is no shorter where
the others stay as they are, and where they try something too its steps say nothing of its own plan.
Every eighth step the ranks tell each other what they would try. They try it where each of them
would, or has it already, and go back together unless steps are shorter on all that tried.

Pure: what is told is a small number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntFlag

from hytrain_fx.ir.plan import Placement, Plan

AGREE_STEPS = 8  # between two steps at which ranks tell each other


class Told(IntFlag):
    """What a rank tells the others."""

    NOTHING = 0
    WANTS_ON_DEVICE = 1  # it would try all states on the device
    WANTS_STREAMED = 2  # it would try to stream all states on the host
    HAS_ON_DEVICE = 4  # all its states are there, or its plan stays
    HAS_STREAMED = 8  # the CPU updates none of its states, or its plan stays
    TRIES = 16
    PAID = 32  # the steps that it tries are shorter
    VAIN = 64  # they are no shorter


_ACTS = Told.WANTS_ON_DEVICE | Told.WANTS_STREAMED | Told.PAID | Told.VAIN  # told by a rank that can act on what follows
_KINDS = ((Told.WANTS_STREAMED, Told.HAS_STREAMED), (Told.WANTS_ON_DEVICE, Told.HAS_ON_DEVICE))


def to_tell(controller: Told, plan: Plan | None, *, untried: bool, away: bool) -> Told:
    """What a rank tells.

    controller    what it says itself
    plan          in force; None: it stays, whatever is tried
    untried       whether it would now stream all states on the host
    away          it does nothing after this step, so no trial begins or ends
    """
    if plan is None:
        return Told.HAS_ON_DEVICE | Told.HAS_STREAMED
    found = controller | (Told.WANTS_STREAMED if untried else Told.NOTHING)
    if away:
        found &= ~_ACTS
    found |= Told.NOTHING if plan.numel(Placement.CPU) else Told.HAS_STREAMED
    return found | (Told.NOTHING if any(map(plan.numel, (Placement.CPU, Placement.STREAM))) else Told.HAS_ON_DEVICE)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks do at this step.

    begins   what those that want it try from now on; NOTHING at other steps
    paid     whether the trial that ends now has paid; None: none ends
    """

    begins: Told = Told.NOTHING
    paid: bool | None = None

    @classmethod
    def by(cls, numbers: Sequence[int]) -> Agreed:
        """What follows from what the ranks have told, the same on all of them."""
        told = [Told(number) for number in numbers]
        trying = [of for of in told if of & Told.TRIES]
        if trying:
            ended = all(of & (Told.PAID | Told.VAIN) for of in trying)
            return cls(paid=all(of & Told.PAID for of in trying) if ended else None)
        for wants, there in _KINDS:
            if any(of & wants for of in told) and all(of & (wants | there) for of in told):
                return cls(begins=wants)
        return cls()


class AgreedTrials:
    """Those of one session and the others of its ranks. `tell` gives what each rank has told."""

    def __init__(self, tell: Callable[[str, int], Sequence[int]]) -> None:
        self._tell = tell

    def at(self, steps_done: int, told: Callable[[], Told]) -> Agreed:
        """What all ranks do after this step. Each comes here at every step; raises RankError."""
        return Agreed() if steps_done % AGREE_STEPS else Agreed.by(self._tell("what plans to try", told()))
