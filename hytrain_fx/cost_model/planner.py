"""From a profile to a plan.

It says how many leading units are updated on the device, what of the rest is streamed, and why.

    seed      HyTrainDNN's balance of both sides (equation.py)
    cotrain   the same with alpha = 1
    windowed  each layer's own window, from its gradient to its next use (windows.py), with or
              without streaming (streaming.py)

A k that is too small costs 1/alpha (15 to 80) times as much as one that is too large by the same
amount, so CPU times are multiplied by a guard before solving. Predictions are simulated with the
unguarded times. A plan that streams is made only where the simulator, too, finds it faster.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from hytrain_fx.cost_model.budget import Budget, UnitBytes, budget_inputs, inputs_of
from hytrain_fx.cost_model.cuts import at_a_cut, cuts_of, fastest
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.equation import Balance
from hytrain_fx.cost_model.fetches import fetch_figures
from hytrain_fx.cost_model.host_memory import bytes_per_us
from hytrain_fx.cost_model.pieces import Span, with_more_on_device
from hytrain_fx.cost_model.reasons import (
    balance_notes,
    balance_reason,
    capped_reason,
    filling_reason,
    fixed_reason,
    host_full_reason,
    memory_notes,
    streamed_reason,
    windows_reason,
)
from hytrain_fx.cost_model.simulate import steady_step
from hytrain_fx.cost_model.solution import Solution
from hytrain_fx.cost_model.streaming import best_mix, least_of_convex, ranges_of
from hytrain_fx.cost_model.windows import Windows, windows_under
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.limits import LEAST_GAIN_SHARE
from hytrain_fx.ir.plan import Placement, Plan, PlannedUnit, PlanRow
from hytrain_fx.ir.profile import Profile, UnitProfile
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM
from hytrain_fx.ir.task_graph import Resource, TaskKind, Unit

Rule = Literal["seed", "cotrain", "windowed"]
Stream = float | Literal["auto"]
GUARD = 1.05
# Shares of the best one by capacities alone. A little less often ends earlier, since copies of
# states yield to gradients and weights.
_SHARES_TRIED = (1.0, 0.93)
# Copies and updates that share the host's memory are slower than what the share was solved with: it
# is looked for from this part of that share on, in so many rounds.
_LEAST_PART, _ROUNDS = 0.55, 7
SHARES_THAT_MAY_FIT: Final = (0.25, 0.5, 0.75, 0.9, 1.0)
"""Shares that are tried where the host has no room for the slots of all that is on it."""


def plan(
    profile: Profile,
    *,
    rule: Rule = "windowed",
    budget_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    state_bytes_per_param: float = STATE_BYTES_PER_PARAM,
    host_state_bytes_per_param: float = STATE_BYTES_PER_PARAM,
    budget_counts_streamed: bool = True,
    staged_bytes_per_param: float | None = None,
    unit_bytes: Sequence[UnitBytes] = (),
    k: int | None = None,
    stream: Stream = 0.0,
    guard: float = GUARD,
    discipline: Discipline | None = None,
) -> Plan:
    """Solve k by `rule`, or take the given `k`; bring it within both memories, predict the step.
    budget_bytes           device memory for optimizer states, None = no limit
    host_budget_bytes      host memory for states and slots, None = no limit
    state_bytes_per_param  what rests on the device for each parameter updated there
    host_state_bytes_per_param    the states of a parameter on the host, without its slot
    budget_counts_streamed    whether `budget_bytes` holds streamed gradients and staging slots too
    staged_bytes_per_param    what a staging slot has room for, None = `host_state_bytes_per_param`
    unit_bytes             what each unit takes, where that is known better than by the parameter
    stream                 share 0..1 of the parameters not on the device that is streamed; "auto"
                           solves it together with k (rule "windowed", no k given, a profile with
                           times for streaming; else nothing is streamed)
    discipline             how the runtime orders and gates updates; the default is this library's

    Raises PlanError for an unknown rule, a k outside 0..n, a share outside 0..1 or without times
    for streaming, a guard < 1, and when the two memories together do not hold the states.
    """
    _check(profile, rule, k, stream, guard)
    budget = Budget(budget_bytes, host_budget_bytes, state_bytes_per_param, host_state_bytes_per_param, budget_counts_streamed,
                    staged_bytes_per_param, tuple(unit_bytes))
    maker = _Maker(profile, rule, k, guard, discipline or Discipline(), budget)
    if stream == "auto":
        return maker.filled(maker.best())
    return maker.filled(fastest(profile, [maker.settled(maker.solution(float(stream)))], maker.settle, may_cut=0 < stream < 1))


def streamed_k(
    profile: Profile,
    *,
    budget_bytes: int,
    host_budget_bytes: int,
    state_bytes_per_param: float,
    host_state_bytes_per_param: float,
    budget_counts_streamed: bool,
    guard: float,
    discipline: Discipline,
    staged_bytes_per_param: float | None = None,
    unit_bytes: Sequence[UnitBytes] = (),
) -> int | None:
    """The k of `plan(profile, stream="auto", ...)` where that streams, by the windows alone.

    None where the windows give no share to streaming, or where nothing fits without it.

    For whoever looks often whether another plan is due: no step is simulated, which is most of what
    a plan costs.
    """
    budget = Budget(budget_bytes, host_budget_bytes, state_bytes_per_param, host_state_bytes_per_param, budget_counts_streamed,
                    staged_bytes_per_param, tuple(unit_bytes))
    maker = _Maker(profile, "windowed", None, guard, discipline, budget)
    try:
        without, _, _ = maker.fitted(maker.solution(0.0))
    except PlanError:
        return None
    k, share = maker.mix(without)
    return maker.fitted(replace(maker.solution(share), k=k))[0] if share > 0 else None


@dataclass(frozen=True)
class _Maker:
    """Makes plans for one profile under one budget and discipline."""

    profile: Profile
    rule: Rule
    k: int | None
    guard: float
    discipline: Discipline
    budget: Budget

    def solution(self, share: float) -> Solution:
        """What the rule wants with a share y that is given."""
        if self.k is not None:
            return Solution(self.k, fixed_reason, share=share)
        if self.rule == "windowed":
            windows = windows_under(self.discipline, self.profile, self.guard).streaming(share)
            return Solution(windows.solve(), lambda unit, k: windows_reason(windows, unit, k), share=share)
        cpu = tuple(self.guard * u.cpu_update_us for u in self.profile.units)
        gpu = cpu if self.rule == "cotrain" else tuple(u.gpu_update_us for u in self.profile.units)
        balance = Balance(self.profile.backward_us, cpu, gpu)
        notes = balance_notes(balance, self.profile.alpha)
        return Solution(balance.solve(), lambda unit, k: balance_reason(balance, unit, k), notes, share)

    def best(self) -> Plan:
        """The plan without streaming; with it, where that shortens the predicted step by 1%.

        Or where no other fits: what is streamed has no slots on the host.
        """
        may_stream = self.k is None and self.rule == "windowed" and self.profile.can_stream
        try:
            without = self.settle(self.solution(0.0))
        except PlanError:
            if may_stream and (fitting := self._fitting()):
                return min(fitting, key=lambda made: made.predicted["step_us"])
            raise
        if not may_stream:
            return without
        k, share = self.mix(without.k)
        tried = [self._near(k, share)] if share else []
        tried += [[self.settled(self._mixed(0, 0.0))]] if not k and cuts_of(self.profile, 0.0) else []  # the first unit alone is cut
        streams = [made for of in tried if (made := fastest(self.profile, of, self.settle)).numel(Placement.STREAM)]
        if not streams:
            return without
        streamed = min(streams, key=lambda made: made.predicted["step_us"])
        step_us, streamed_us, tried_share = without.predicted["step_us"], streamed.predicted["step_us"], streamed.inputs["stream_share"]
        if streamed_us <= (1 - LEAST_GAIN_SHARE) * step_us:
            note = f"without streaming the step would take {time_text(step_us)}, with {time_text(streamed_us)}"
            return replace(streamed, notes=(*streamed.notes, note))
        note = f"streaming {tried_share:.0%} of the parameters was tried: {time_text(streamed_us)} instead of {time_text(step_us)}"
        return replace(without, notes=(*without.notes, note))

    def _fitting(self) -> list[Plan]:
        """Plans with shares that both memories hold; with none nothing fits."""
        found = []
        for share in SHARES_THAT_MAY_FIT:
            with suppress(PlanError):
                made = self.settle(self._mixed(0, share))
                found.append(replace(made, notes=(*made.notes, "the host's memory holds the states only with a share streamed")))
        return found

    def mix(self, k: int) -> tuple[int, float]:
        """k and y by the windows; y = 0 where nothing is gained.

        The k that fits shrinks with y, so y is solved again with it.
        """
        # Streaming too much costs as much as streaming too little, so the share is solved with
        # unguarded CPU times.
        compute_us, windows = self.profile.compute_us, self._windows
        least = self.budget.least_units(self.profile, 0.0)
        while True:
            k, share = best_mix(windows, k, min(least, k), compute_us)
            fit = self.budget.most_units(self.profile, share, self.discipline)
            if share == 0.0 or k <= fit:
                return k, share
            if fit < least:
                return k, 0.0
            k = fit

    def _near(self, k: int, share: float) -> list[tuple[Solution, Plan]]:
        """Solutions with shares up to y, and their plans; most of them near the fastest."""
        made = [self.settled(self._mixed(k, share * part)) for part in _SHARES_TRIED]
        if self.profile.host_memory_gb_per_s is None:
            return made

        def step_us(less: float) -> float:
            made.append(self.settled(self._mixed(k, less)))
            return made[-1][1].predicted["step_us"]

        least_of_convex(step_us, _LEAST_PART * share, share, _ROUNDS)
        return made

    def settled(self, solution: Solution) -> tuple[Solution, Plan]:
        """The solution beside its plan."""
        return solution, self.settle(solution)

    def _mixed(self, k: int, share: float) -> Solution:
        windows, mix = self._windows, self._windows.streaming(share)
        return Solution(k, lambda unit, k: windows_reason(mix, unit, k), (), share, lambda unit, k: streamed_reason(windows, mix, unit, k))

    def fitted(self, solution: Solution) -> tuple[int, int, int]:
        """The solution's k within both memories.

        Also the most units that fit the device, and the fewest that the host needs there.
        """
        units = len(self.profile.units)
        kept_share, copied_params = at_a_cut(self.profile, solution)
        fit = self.budget.most_units(self.profile, kept_share, self.discipline)
        fit = fit if solution.cut is None else min(fit, 0)
        least = self.budget.least_units(self.profile, solution.share, copied_params)
        if fit < 0:
            raise PlanError(f"the device's {self.budget.device_bytes} bytes do not hold the gradients and the staging slots of a streamed "
                            f"share of {solution.share:.3g}; stream less or allow more memory")
        if least > fit:
            raise PlanError(f"no plan fits the memory: the host's {self.budget.host_bytes} bytes need the states of {least} of {units} "
                            f"units on the device, its {self.budget.device_bytes} bytes hold {fit}; allow more memory or train a smaller "
                            "model")
        return max(min(solution.k, fit), least), fit, least

    def settle(self, solution: Solution) -> Plan:
        """The solution within both memories, as a plan with its reasons and its prediction."""
        wanted, units = solution.k, len(self.profile.units)
        k, fit, least = self.fitted(solution)
        verdict = "was given" if self.k is not None else "would be best"
        notes = (*memory_notes(wanted, fit, least, units, verdict), *solution.notes)
        if self.k is None and self.guard > 1:
            notes = (*notes, f"solved with CPU update times {self.guard:.3g} times as long as measured")

        def reason(unit: int) -> str:
            if k <= unit < wanted and self.budget.device_bytes is not None:
                nbytes = self.budget.of(self.profile.units[unit]).device
                return capped_reason(nbytes, self.budget.device_bytes, fit, wanted)
            if wanted <= unit < k and self.budget.host_bytes is not None:
                return host_full_reason(self.budget.host_bytes, least, wanted)
            return solution.reason(unit, k)

        source = self.rule if self.k is None else "fixed k"
        draft = prefix_plan(self.profile.units, k, source=source, reason=reason, share=solution.share,
                            streamed_reason=lambda unit: solution.why_streamed(unit, k), cut=solution.cut)
        share = solution.share or draft.numel(Placement.STREAM) / self.profile.params
        inputs = {**inputs_of(self.profile, self.guard), "stream_share": share, **budget_inputs(self.profile, self.budget)}
        return replace(draft, inputs=inputs, notes=notes, predicted=self._predicted(draft))

    def filled(self, made: Plan) -> Plan:
        """The plan with the room that whole units leave given to pieces of the next unit.

        That is the rest of a bound on resident states. It happens only where the prediction is
        faster.

        Not where the bound is what the device has free: what whole units leave of that is room for
        what no estimate knows.
        """
        bound, k = self.budget, made.k
        if self.k is not None or self.rule != "windowed" or bound.device_bytes is None or bound.counts_streamed:
            return made
        if k == len(self.profile.units) or k != bound.most_units(self.profile, 0.0, self.discipline):
            return made
        free_bytes, unit = bound.device_bytes - sum(bound.of(unit).device for unit in self.profile.units[:k]), self.profile.units[k]
        more = with_more_on_device(made, unit, free_bytes, bound.of(unit).device / unit.params, filling_reason(bound.device_bytes, k))
        if more is made or not bound.holds_copies(self.profile.units, made, more):
            return made
        predicted = self._predicted(more)
        return replace(more, predicted=predicted) if predicted["step_us"] < made.predicted["step_us"] else made

    def _predicted(self, made: Plan) -> dict[str, float]:
        budget = self.budget
        return predict(self.profile, made, budget.device_state_bytes, self.discipline, budget.host_state_bytes, budget.of_units)

    @functools.cached_property
    def _windows(self) -> Windows:
        return windows_under(self.discipline, self.profile, guard=1.0)


def prefix_plan(
    units: Sequence[PlannedUnit],
    k: int,
    *,
    source: str,
    reason: Callable[[int], str],
    share: float = 0.0,
    streamed_reason: Callable[[int], str] | None = None,
    cut: Span | None = None,
) -> Plan:
    """A plan with the first `k` units wholly on the device and the others on the CPU.

    Nothing is predicted.

    With a `share` whole parameters of the others are streamed, about that much of every leading
    part of them, and with a `cut` that range of the first one (`ranges_of`); the units must be
    `Unit` or `UnitProfile`. It needs no profile, so it also serves the first steps.
    """
    if not 0 <= k <= len(units):
        raise PlanError(f"found k={k}, expected 0..{len(units)}: the model has {len(units)} units")
    rows = [PlanRow(u.index, u.name, 0, u.params, Placement.GPU, reason(u.index)) for u in units[:k]]
    sized = [u for u in units[k:] if isinstance(u, (Unit, UnitProfile))] if share or cut else []
    if (share or cut) and len(sized) != len(units) - k:
        raise PlanError("found units without the sizes of their parameters, expected Unit or UnitProfile where a share is streamed")
    whole = [[(0, u.params, Placement.CPU)] for u in units[k:]]
    for unit, ranges in zip(units[k:], ranges_of(sized, share, cut) if share or cut else whole, strict=True):
        for begin, end, place in ranges:
            why = streamed_reason if place.visits_device and streamed_reason else reason
            rows.append(PlanRow(unit.index, unit.name, begin, end, place, why(unit.index)))
    return Plan(tuple(rows), k, source)


def predict(
    profile: Profile,
    plan: Plan,
    state_bytes_per_param: float = STATE_BYTES_PER_PARAM,
    discipline: Discipline | None = None,
    host_state_bytes_per_param: float = STATE_BYTES_PER_PARAM,
    unit_bytes: Sequence[UnitBytes] = (),
) -> dict[str, float]:
    """What `plan` is expected to cost on `profile`: simulated times, and bytes by tier.

    `host_bytes` counts the states of shares not on the device, and for those updated by the CPU
    slots for their gradients (in) and new weights (out). `stream_bytes` cross the link in each
    direction in a step. Of the bandwidth of host memory, where it is known, the share is predicted
    that is left; of weights that rest on the host, `fetch_figures`.
    """
    step = steady_step(profile, plan, discipline := discipline or Discipline())
    graph, schedule, rate = step.graph, step.schedule, bytes_per_us(profile)
    sizes = Budget(None, None, state_bytes_per_param, host_state_bytes_per_param, counts_streamed=False, of_units=tuple(unit_bytes))
    return {
        "step_us": schedule.makespan_us,
        "compute_us": profile.compute_us,
        "stall_us": schedule.stall_us,
        "gpu_update_us": graph.total("us", TaskKind.GPU_UPDATE),
        "cpu_update_us": schedule.busy_us(Resource.CPU),
        "gpu_idle_share": schedule.idle_share(Resource.GPU),
        "cpu_idle_share": schedule.idle_share(Resource.CPU),
        "d2h_idle_share": schedule.idle_share(Resource.D2H),
        "h2d_idle_share": schedule.idle_share(Resource.H2D),
        **({"collectives_idle_share": schedule.idle_share(Resource.COLLECTIVES)} if profile.has_collectives else {}),
        **({} if rate is None else {"host_memory_idle_share": max(0.0, 1 - graph.host_bytes / rate / schedule.makespan_us)}),
        **fetch_figures(profile, plan, discipline.units_ahead, schedule),
        "gpu_states_bytes": sizes.device_needs(profile.units, plan, discipline),
        "host_bytes": sizes.host_needs(profile.units, plan),
        "stream_bytes": graph.total("bytes", TaskKind.STREAM_IN),
    }


def _check(profile: Profile, rule: str, k: int | None, stream: Stream, guard: float) -> None:
    if rule not in get_args(Rule):
        raise PlanError(f"found rule={rule!r}, expected one of {get_args(Rule)}")
    if k is not None and not 0 <= k <= len(profile.units):
        raise PlanError(f"found k={k}, expected 0..{len(profile.units)}: the model has {len(profile.units)} units")
    if stream != "auto" and not 0 <= stream <= 1:
        raise PlanError(f"found stream={stream}, expected \"auto\" or a share 0..1 of the parameters not on the device")
    if stream not in ("auto", 0) and not profile.can_stream:
        raise PlanError(f"found stream={stream}, but the profile has no times for streaming (stream_in_us, stream_out_us); measure them")
    if not (math.isfinite(guard) and guard >= 1):
        raise PlanError(f"found guard={guard}, expected a factor >= 1 on CPU times")
