"""A model as the stages of a 1F1B pipeline, one on each GPU: its step, and what updates add to it.

Each stage runs its micro-batches in the order of 1F1B. One whose inputs are not there waits. Steps
follow one another, so while the last micro-batches of a step run backwards through the first
stages, the last stage stands still already: its bubble. What updates add to the step is found for
each stage by itself, with its own bubble (cost_model/windows.py); the step is taken to be longer by
the most that any stage adds. Sending activations takes no time here. Each GPU has a host of its own
as the device's figures say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import plan as solve
from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.errors import ConfigError
from hytrain_fx.explain.timeline.lanes import Lanes
from hytrain_fx.explain.timeline.span import STAGE, UPDATES, Span
from hytrain_fx.explain.timeline.stage_rows import together
from hytrain_fx.ir.figures import Table, count_text, time_text
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.schedule import Interval
from hytrain_fx.ir.task_graph import TaskKind

_Ends = dict[tuple[int, int, str, int], float]  # by step, stage, "f" or "b", and micro-batch
_STEPS = 3  # until the order of steps repeats
_NO_MEMORY = "Memory is not counted: a k may be more than its GPU holds beside weights, gradients and activations."
MOST_MICRO_BATCHES = 4096


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage.

    units      of the model, in forward order: from the first one to before the last one
    params     elements
    bubble_us  from its last backward to the next step's first forward, where nothing waits for
               updates
    k          its units updated on the device, solved
    added_us   what updates add to the step: by the CPU after the step, all by the CPU beside the
               step, all on the device, as solved
    updates    as solved; times from the begin of its last backward
    """

    units: tuple[int, int]
    params: int
    bubble_us: float
    k: int
    added_us: tuple[float, float, float, float]
    updates: tuple[Interval, ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineForecast:
    """A step of `micro_batches`, which takes `compute_us` where nothing waits for updates."""

    micro_batches: int
    compute_us: float
    stages: tuple[StageForecast, ...]
    timeline: Lanes

    @property
    def steps_us(self) -> tuple[float, float, float, float]:
        """The step in the ways of `StageForecast.added_us`."""
        after, beside, device, solved = (self.compute_us + max(of.added_us[way] for of in self.stages) for way in range(4))
        return after, beside, device, solved

    def table(self) -> Table:
        """Stage by stage."""
        head = ("stage", "layers", "parameters", "bubble", "after the step, CPU", "beside it, CPU", "on the GPU", "k solved", "k")
        rows = [(str(i), f"{of.units[0]}..{of.units[1] - 1}", count_text(of.params), time_text(of.bubble_us), *map(time_text, of.added_us),
                 f"{of.k} of {of.units[1] - of.units[0]}") for i, of in enumerate(self.stages)]
        steps = ("", "the step", "", "", *map(time_text, self.steps_us), "")
        return Table(f"{len(rows)} stages, {self.micro_batches} micro-batches, 1F1B: {time_text(self.compute_us)} a step without updates; "
                     "what they add", head, (*rows, steps), (_NO_MEMORY,), words=(0, 1))


def pipeline_forecast(profile: Profile, stages: int, micro_batches: int) -> PipelineForecast:
    """What a model of this profile takes, whose times are those of one micro-batch.

    Raises as `in_stages` does.
    """
    period_us, made = in_stages(profile, stages, micro_batches)
    found = [_stage(own, begin, period_us) for begin, own in made]
    return PipelineForecast(micro_batches, period_us, tuple(found), _timeline([own for _, own in made], found, micro_batches))


def in_stages(profile: Profile, stages: int, micro_batches: int) -> tuple[float, list[tuple[int, Profile]]]:
    """The step in which nothing waits for updates, and each stage: its first unit, its profile.

    A stage's profile has what lies between its first forward and its last backward, and its bubble.

    Raises ConfigError where there are not as many units as stages, or too few micro-batches.
    """
    if not 1 <= stages <= len(profile.units):
        raise ConfigError(f"found {stages} stages, expected 1 to {len(profile.units)}, the layers of the model")
    if not stages <= micro_batches <= MOST_MICRO_BATCHES:
        raise ConfigError(f"found {micro_batches} micro-batches, expected {stages}, one for each stage, to {MOST_MICRO_BATCHES}")
    cuts = cut([u.forward_us + u.backward_us for u in profile.units], stages)
    parts = [_part(profile, begin, end) for begin, end in pairwise(cuts)]
    period_us, bubbles_us = one_f_one_b([part.forward_us for part in parts], [part.backward_us for part in parts], micro_batches)
    made = []
    for part, bubble_us, begin in zip(parts, bubbles_us, cuts, strict=False):
        between_us = period_us - bubble_us - part.forward_us - part.backward_us
        made.append((begin, replace(part, bubble_us=bubble_us, between_us=max(between_us, 0.0))))
    return period_us, made


def _timeline(parts: Sequence[Profile], found: Sequence[StageForecast], micro_batches: int) -> Lanes:
    """A step of all stages, from where the last stage ends the one before, with what is solved.

    The forwards and backwards are those of steps that wait for no update.
    """
    took_us = {"f": [part.forward_us for part in parts], "b": [part.backward_us for part in parts]}
    end_us = _ends([_order(len(parts) - stage, micro_batches) for stage in range(len(parts))], took_us["f"], took_us["b"])
    first_us = end_us[_STEPS - 2, len(parts) - 1, "b", micro_batches - 1]
    rows = []
    for number, stage in enumerate(found):
        computed = [Span(f"{STAGE} {number}", _KINDS[kind], at, end - took_us[kind][number], end)
                    for (_, of, kind, at), end in end_us.items() if of == number]
        begin_us = end_us[_STEPS - 2, number, "b", micro_batches - 1] - took_us["b"][number]
        updated = [Span(f"{UPDATES} {number}", of.task.kind, of.task.unit, begin_us + of.start_us, begin_us + of.end_us)
                   for of in stage.updates]
        rows.append([replace(span, begin_us=max(span.begin_us, first_us)) for span in computed + updated if span.end_us > first_us])
    return together(rows, "predicted")


_KINDS = {"f": TaskKind.FORWARD, "b": TaskKind.BACKWARD}


def _part(profile: Profile, begin: int, end: int) -> Profile:
    units = tuple(replace(u, index=i) for i, u in enumerate(profile.units[begin:end]))
    return replace(profile, units=units, commit_us=profile.commit_us * len(units) / len(profile.units))


def _stage(own: Profile, begin: int, period_us: float) -> StageForecast:
    n = len(own.units)
    by_cpu, on_device = (prefix_plan(own.units, k, source="fixed k", reason=lambda unit: "") for k in (0, n))
    made = solve(own)
    ways = ((by_cpu, Discipline(barrier="zero_offload")), (by_cpu, Discipline()), (on_device, Discipline()), (made, Discipline()))
    schedules = [simulate(own, plan, discipline) for plan, discipline in ways]
    after, beside, device, solved = (max(schedule.makespan_us - period_us, 0.0) for schedule in schedules)
    updates = tuple(of for of in schedules[-1].intervals if of.task.kind in (TaskKind.CPU_UPDATE, TaskKind.GPU_UPDATE))
    return StageForecast((begin, begin + n), own.params, own.bubble_us, made.k, (after, beside, device, solved), updates)


def cut(costs_us: Sequence[float], parts: int) -> list[int]:
    """Where to cut a row of costs so that the largest part is least: the first of each, the end.

    No part is empty.
    """
    sums = list(accumulate(costs_us, initial=0.0))
    n = len(costs_us)
    least = [[0.0] + [float("inf")] * n]  # by parts and units: the largest part
    chosen: list[list[int]] = [[0] * (n + 1)]
    for part in range(1, parts + 1):
        row, cuts = [float("inf")] * (n + 1), [0] * (n + 1)
        for end in range(part, n + 1):
            row[end], cuts[end] = min((max(least[-1][begin], sums[end] - sums[begin]), begin) for begin in range(part - 1, end))
        least.append(row)
        chosen.append(cuts)
    found = [n]
    for part in range(parts, 0, -1):
        found.append(chosen[part][found[-1]])
    return found[::-1]


def one_f_one_b(forward_us: Sequence[float], backward_us: Sequence[float], micro_batches: int) -> tuple[float, list[float]]:
    """The steady step of 1F1B, and how long each stage stands still between two steps.

    forward_us, backward_us   of one micro-batch, by stage
    """
    stages = len(forward_us)
    orders = [_order(stages - stage, micro_batches) for stage in range(stages)]
    end_us = _ends(orders, forward_us, backward_us)
    final = micro_batches - 1
    before, last = ([end_us[step, stage, "b", final] for stage in range(stages)] for step in (_STEPS - 2, _STEPS - 1))
    begins_us = [end_us[_STEPS - 1, stage, "f", 0] - forward_us[stage] for stage in range(stages)]
    return max(last) - max(before), [begin_us - end for begin_us, end in zip(begins_us, before, strict=True)]


def _ends(orders: Sequence[Sequence[tuple[str, int]]], forward_us: Sequence[float], backward_us: Sequence[float]) -> _Ends:
    """When each forward and backward of `_STEPS` steps ends, by stage in these orders."""
    stages = len(orders)
    end_us: _Ends = {}
    free_us, at = [0.0] * stages, [0] * stages
    while any(at[stage] < _STEPS * len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < _STEPS * len(orders[stage]):
                step, place = divmod(at[stage], len(orders[stage]))
                kind, number = orders[stage][place]
                neighbour = stage - 1 if kind == "f" else stage + 1
                needs = (step, neighbour, kind, number)
                if 0 <= neighbour < stages and needs not in end_us:
                    break
                begin_us = max(free_us[stage], end_us.get(needs, 0.0))
                free_us[stage] = end_us[step, stage, kind, number] = begin_us + (forward_us if kind == "f" else backward_us)[stage]
                at[stage] += 1
    return end_us


def _order(warm: int, micro_batches: int) -> list[tuple[str, int]]:
    """What a stage runs: `warm` forwards, then a backward and a forward in turn, then backwards."""
    warm = min(warm, micro_batches)
    order = [("f", i) for i in range(warm)]
    for i in range(micro_batches - warm):
        order += [("b", i), ("f", warm + i)]
    return order + [("b", i) for i in range(micro_batches - warm, micro_batches)]
