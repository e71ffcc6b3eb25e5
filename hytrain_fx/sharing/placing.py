"""The share of a batch and the places of states, solved together in a session that runs.

    the trial has ended    from the plan in force, its profile, and what the trial has shown. Where
                           another plan is better with a share, states move before the next forward
    while a share trains   states stay there: what steps take then is no plan's
    none pays              they go back
"""

from __future__ import annotations

from functools import partial

from hytrain_fx.cost_model.cpu_share import CpuShare, ShareTimes, best_share
from hytrain_fx.cost_model.share_and_states import Shared, ShareRates, solve_together, times_under
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.planning.planning import Planning


class SharePlacing:
    """Of one session, for as long as its share is "auto"."""

    def __init__(self, planning: Planning) -> None:
        self._planning = planning
        self._before: Plan | None = None  # in force before states moved for a share

    def solved(self, times: ShareTimes) -> tuple[CpuShare, float]:
        """The share that is solved with the states, and what its steps take beside it, in us.

        times   as they were measured with the plan in force and one sequence on the CPU

        Where another plan suits it better, that is put in force before the next forward.
        """
        planning, profile = self._planning, self._planning.profile
        if profile is None or not planning.solver.solves or "step_us" not in planning.plan.predicted:
            return best_share(times), times.around_us
        found = self.together(profile, times)
        if found.plan is not planning.plan and found.share.by_cpu:
            self._before = planning.plan
            steps = f"{time_text(found.share.step_us)} a step instead of {time_text(found.share.without_us)}"
            planning.want(found.plan, f"solved with the CPU's share: {steps}")
            return found.share, found.times.around_us
        return best_share(times), times.around_us

    def together(self, profile: Profile, times: ShareTimes) -> Shared:
        """The plan and the share with the shortest step, by the model set to the measured times."""
        planning, alone = self._planning, self._planning.plan
        modelled = times_under(profile, alone, ShareRates(times.sequences, times.cpu_sequence_us))
        rates = ShareRates(
            times.sequences, times.cpu_sequence_us,
            launch_us=max(times.begin_us - modelled.begin_us - modelled.update_us, 0.0),
            join_us=max(times.join_us - modelled.join_us, 0.0),
            around_us=max(times.around_us - modelled.around_us, 0.0),
        )
        plan_at = partial(planning.solver.at, profile=profile, guard=planning.guard, discipline=planning.discipline)
        return solve_together(profile, rates, alone, plan_at)

    def hold(self, shares: bool) -> None:
        """Whether the CPU trains in this step, or is tried: states stay then; no plan is made."""
        planning = self._planning
        planning.held = planning.last.steps_done + 1 if shares else 0
        if not shares and self._before is not None:
            before, self._before = self._before, None
            planning.want(before, "no share pays: states are where they were")
