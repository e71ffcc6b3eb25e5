"""What a rule wants of a plan, before it is brought within both memories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hytrain_fx.cost_model.pieces import Span
from hytrain_fx.cost_model.reasons import given_share_reason


@dataclass(frozen=True)
class Solution:
    """The k a rule wants with the share y, and why.

    reason, why_streamed    of a unit on the device or the CPU, and of its streamed part, once k and
                            y are settled
    notes                   what else the rule says
    cut                     a range of the first unit that is streamed, whatever the share
    """

    k: int
    reason: Callable[[int, int], str]
    notes: tuple[str, ...] = ()
    share: float = 0.0
    why_streamed: Callable[[int, int], str] = given_share_reason
    cut: Span | None = None
