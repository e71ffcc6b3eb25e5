"""What would shorten the step most.

The plan is solved again for a machine, a batch or a loop that is a little better.

    1 GB more on the device      k may grow
    CPU updates 10% faster       more or faster cores
    copies 10% faster            the link
    10% more tokens              longer windows to hide updates in; counted for the same number of
                                 tokens
    step() called at once        a loop that does not wait for the GPU before step()

Each is compared with the prediction for things unchanged, in the same way: by a plan solved
again or the one in force, whichever is faster. Where the plan was given, or memory on the host
decides k, only the schedule of the plan in force is predicted again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, get_args

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.equation import uniform_sensitivities
from hytrain_fx.cost_model.planner import GUARD, Rule, Stream
from hytrain_fx.cost_model.planner import plan as solve
from hytrain_fx.cost_model.reasons import RESOURCE_WORDS, STREAMED_WORDS
from hytrain_fx.cost_model.simulate import PlayedStep, simulate
from hytrain_fx.cost_model.windows import windows_under
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM
from hytrain_fx.ir.task_graph import TaskKind

MORE_BYTES = 1_000_000_000
MOST_TOKENS = 4.0
"""The most times as many tokens that `tokens_to_hide` tries."""
FASTER = 1.1
_LINK = ("d2h_us", "h2d_us", "stream_in_us", "stream_out_us", "fetch_us")


@dataclass(frozen=True, slots=True)
class Help:
    """One change, the k of its plan, and what it saves.

    The saving of a step is predicted, in microseconds and as a share of the step.
    """

    change: str
    k: int
    gain_us: float
    gain_share: float


@dataclass(frozen=True, slots=True)
class KSensitivity:
    """How far HyTrainDNN's k for equal layers moves, in layers, where a term grows by 1%."""

    t_cpu: float
    t_bwd: float
    alpha: float


def what_helps(profile: Profile, plan: Plan, discipline: Discipline, stream: Stream = "auto") -> list[Help]:
    """The changes above that apply, by what they are predicted to save, the most first.

    stream    as the plan was solved with: "auto", or the share that was given

    Solves six plans at most, 10 to 60 ms each for a model of 30 units.
    """
    again = _Again(plan, discipline, stream if profile.can_stream else 0.0)
    now = again.best_of(profile)
    if now is None:
        return []
    found = []
    for change, changed, tokens, more_bytes in _changes(profile, again):
        step_us, k = again.best_of(changed, more_bytes) or now
        gain_us = now[0] - step_us / tokens
        found.append(Help(change, k, gain_us, gain_us / now[0]))
    return sorted(found, key=lambda help: -help.gain_us)


def k_sensitivity(profile: Profile) -> KSensitivity | None:
    """What 1% of each term is worth in k.

    All 0 where the equation gives k = 0; None where CPU or device updates have no time.
    """
    n, t_bwd, t_cpu = len(profile.units), profile.backward_us, profile.cpu_update_us
    if not (t_bwd > 0 and t_cpu > 0 and profile.gpu_update_us > 0):
        return None
    slope = uniform_sensitivities(n, t_bwd, t_cpu, profile.alpha)
    return KSensitivity(0.01 * t_cpu * slope["t_cpu"], 0.01 * t_bwd * slope["t_bwd"], 0.01 * profile.alpha * slope["alpha"])


@dataclass(frozen=True)
class _Again:
    """Solves as the plan in force was solved, as far as its inputs tell."""

    plan: Plan
    discipline: Discipline
    stream: Stream

    @property
    def solves(self) -> bool:
        """Whether a rule made the plan, within the device's memory alone."""
        raised = any(note.startswith("raised by host memory") for note in self.plan.notes)
        return self.plan.source in get_args(Rule) and not raised

    @property
    def budget_bytes(self) -> int | None:
        """Device memory for states; None = no limit."""
        found = self.plan.inputs.get("budget_bytes")
        return None if found is None else int(found)

    def best_of(self, profile: Profile, more_bytes: int = 0) -> tuple[float, int] | None:
        """The predicted step for this profile and its k.

        By a plan solved for it or, where that is better, by the one in force.

        None where neither can be predicted.
        """
        found = []
        with suppress(PlanError):
            found.append((simulate(profile, self.plan, self.discipline).makespan_us, self.plan.k))
        if self.solves:
            with suppress(PlanError):
                solved = solve(profile, **self._options(more_bytes))
                found.append((solved.predicted["step_us"], solved.k))
        return min(found, default=None)

    def _options(self, more_bytes: int) -> dict[str, Any]:
        inputs, budget = self.plan.inputs, self.budget_bytes
        return {
            "rule": self.plan.source,
            "budget_bytes": None if budget is None else budget + more_bytes,
            "state_bytes_per_param": inputs.get("state_bytes_per_param", STATE_BYTES_PER_PARAM),
            "budget_counts_streamed": bool(inputs.get("budget_counts_streamed", True)),
            "stream": self.stream,
            "guard": inputs.get("guard", GUARD),
            "discipline": self.discipline,
        }


def _changes(profile: Profile, again: _Again) -> Iterator[tuple[str, Profile, float, int]]:
    """What is changed, the profile then, the factor on a step's tokens, more device bytes."""
    if again.solves and again.budget_bytes is not None and again.plan.k < len(profile.units):
        yield "1 GB more device memory for states", profile, 1.0, MORE_BYTES
    if any(not row.placement.rests_on_device for row in again.plan.rows):
        yield "CPU updates 10% faster", _scaled(profile, ("cpu_update_us",), 1 / FASTER), 1.0, 0
        yield "copies over the link 10% faster", _scaled(profile, _LINK, 1 / FASTER), 1.0, 0
    yield "10% more tokens in a step (for the same tokens)", profile.with_tokens(FASTER), FASTER, 0
    if profile.host_memory_gb_per_s is not None:
        yield "host memory 10% faster", replace(profile, host_memory_gb_per_s=FASTER * profile.host_memory_gb_per_s), 1.0, 0
    if max(profile.commit_us, profile.launching_us) > 0 and again.discipline.commit_at == "backward_start":
        yield "step() called as the device begins the backward", replace(profile, commit_us=0.0, launching_us=0.0), 1.0, 0


def _scaled(profile: Profile, names: Iterable[str], factor: float) -> Profile:
    """The profile with these times of every unit multiplied."""
    units = tuple(replace(unit, **{name: factor * getattr(unit, name) for name in names}) for unit in profile.units)
    return replace(profile, units=units)


def tokens_to_hide(profile: Profile, plan: Plan, discipline: Discipline) -> float | None:
    """How many times as many tokens in a step hide the waits, to a tenth, under the same plan.

    The waits are hidden where they are 1% of the step at most. None where MOST_TOKENS times as many
    do not, or the plan is not simulated.
    """

    def hides(tenths: int) -> bool:
        step = simulate(profile.with_tokens(tenths / 10), plan, discipline)
        return step.stall_us <= _NOTHING * step.makespan_us

    try:
        tenths = 10 + bisect_left(range(10, int(10 * MOST_TOKENS) + 1), True, key=hides)
    except PlanError:
        return None
    return tenths / 10 if tenths <= 10 * MOST_TOKENS else None


# ---- What sets the length of the predicted step, with its figures ----

# Waits and device updates below this share of the step are not mentioned.
_NOTHING = 0.01


@dataclass(frozen=True, slots=True)
class Binding:
    """What sets the length of the step, predicted. Its text is one sentence.

    what       "compute": forward and backward; "device_updates"; "cpu": updates by the CPU; "d2h",
               "h2d": copies to the host, to the device; "host_memory"
    took_us    what forward and backward, or the device updates, or the work of the units take
    cost_us    what updates add to a step of forward and backward, or how long the forward waits
    units      first and last of the units whose work is waited for, None where nothing is
    streams    whether states are among what is copied
    """

    what: str
    took_us: float
    cost_us: float
    units: tuple[int, int] | None = None
    streams: bool = False

    def __str__(self) -> str:
        took = time_text(self.took_us)
        if self.what == "compute":
            return f"forward and backward on the device ({took}): updates add {time_text(self.cost_us)} to a step"
        if self.units is None:
            return f"updates on the device: they take {took} of the step"
        first, last = self.units
        words = (STREAMED_WORDS if self.streams else RESOURCE_WORDS)[self.what]
        span = f"units {first}..{last}" if last > first else f"unit {first}"
        return f"{words} of {span}: they take {took}, the forward waits {time_text(self.cost_us)}"


def binding_constraint(profile: Profile, plan: Plan, step: PlayedStep, discipline: Discipline) -> Binding:
    """What sets the length of the step.

    Computing, updates on the device, CPU updates, or one direction of the link.
    """
    schedule, gpu_update_us = step.schedule, step.graph.total("us", TaskKind.GPU_UPDATE)
    compute_us = profile.compute_us
    exposed_us = schedule.makespan_us - compute_us - profile.bubble_us
    if exposed_us <= _NOTHING * schedule.makespan_us:
        return Binding("compute", compute_us, max(exposed_us, 0.0))
    streamed, by_cpu = plan.numel(Placement.STREAM), plan.numel(Placement.CPU)
    windows = windows_under(discipline, profile, guard=1.0).streaming(streamed / max(streamed + by_cpu, 1))
    tightest = windows.tightest(plan.k)
    if tightest is None or schedule.stall_us <= gpu_update_us:
        return Binding("device_updates", gpu_update_us, exposed_us)
    units = range(plan.k, tightest.last + 1)
    demands_us = {resource: sum(costs[unit] for unit in units) for resource, costs in windows.costs_us.items()}
    # all three stages share the window of the tightest units
    longest = max(demands_us, key=demands_us.__getitem__)
    return Binding(longest, demands_us[longest], schedule.stall_us, (plan.k, tightest.last), bool(streamed))
