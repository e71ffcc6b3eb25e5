"""The rules that solve k, side by side on one profile."""

from __future__ import annotations

from typing import Final, get_args

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import Rule, Stream, plan
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM

STREAMED: Final = "windowed, streamed"
"""The name of that plan in `compare`."""


def compare(
    profile: Profile,
    budget_bytes: int | None = None,
    *,
    state_bytes_per_param: float = STATE_BYTES_PER_PARAM,
    budget_counts_streamed: bool = True,
    discipline: Discipline | None = None,
) -> dict[str, Plan]:
    """The plans of all three rules, of k=0 and of k=n, under one discipline and one budget.

    The budget caps "k=n" too.

    The rules stream nothing; where the profile has times for streaming, "windowed, streamed" is the
    plan with k and share solved.
    """

    def solved(rule: Rule, k: int | None = None, stream: Stream = 0.0) -> Plan:
        return plan(profile, rule=rule, k=k, stream=stream, budget_bytes=budget_bytes, state_bytes_per_param=state_bytes_per_param,
                    budget_counts_streamed=budget_counts_streamed, discipline=discipline)

    plans = {rule: solved(rule) for rule in get_args(Rule)}
    streamed = {STREAMED: solved("windowed", stream="auto")} if profile.can_stream else {}
    return {**plans, **streamed, "k=0": solved("windowed", 0), "k=n": solved("windowed", len(profile.units))}
