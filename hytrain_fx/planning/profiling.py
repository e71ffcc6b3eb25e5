"""A profile of the running program.

Forward and backward come from marks, updates and copies from the engine's records.

`StepReader` keeps the records of the steps that are read for it, and when they ended.

Records are summed by step, and medians taken over steps. A unit that ran a stage with part of its
parameters only gets the time of all at the same rate. A unit that did not run it (on the device
there is no CPU update) keeps its time of the profile before, times the change that the others show.
Without such a time it gets the others' rate, else a probe's.
"""

from __future__ import annotations

import functools
import platform
import statistics
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import psutil
import torch

from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.profile import Profile, UnitProfile
from hytrain_fx.ir.task_graph import Unit
from hytrain_fx.planning.marks import StepMarks, last_backward_begin_us
from hytrain_fx.runtime.engine import Engine, Stage, TaskRecord
from hytrain_fx.runtime.probe import full_duplex_us_per_byte

# The placements whose rows tell how long a stage takes. Updates of streamed rows do not: chunk by
# chunk next to the graph's own kernels, they seem to take six times as long as they keep the
# device.
_PLACES = {
    Stage.D2H: (Placement.CPU,),
    Stage.CPU_UPDATE: (Placement.CPU,),
    Stage.H2D: (Placement.CPU,),
    Stage.GPU_UPDATE: (Placement.GPU,),
    Stage.STREAM_IN: (Placement.STREAM,),
    Stage.STREAM_OUT: (Placement.STREAM,),
}
# Units with a smaller share of the parameters say nothing about the others: their times are mostly
# launching.
_TELLING_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class ReadSteps:
    """What was read.

    ends_us        when the steps ended, on the records' clock, with the end of the step before the
                   first: one more than steps
    records        the engine's
    launching_us   of each step where it is known (`FinishTimes`)
    """

    ends_us: tuple[float, ...]
    records: list[TaskRecord]
    launching_us: tuple[float, ...]


class StepReader:
    """Reads steps between `begin` and `take`.

    Outside of that the engine keeps no records, which cost memory.
    """

    def __init__(self, engine: Engine, marks: StepMarks, time_lanes: Callable[[bool], None]) -> None:
        self._engine = engine
        self._marks = marks
        self._time_lanes = time_lanes  # or not any more
        self._ends_us: list[float] = []
        self._records: list[TaskRecord] = []
        self._launching_us: list[float] = []

    @property
    def is_reading(self) -> bool:
        """Whether steps are being read, or were and have not been taken."""
        return bool(self._ends_us)

    @property
    def steps(self) -> int:
        """Steps read so far."""
        return max(len(self._ends_us) - 1, 0)

    def begin(self) -> None:
        """The next step is the first."""
        self._engine.take_records()  # of earlier steps
        self._marks.clear()
        self._engine.record(True)
        self._time_lanes(True)
        self._records, self._launching_us = [], []
        self._ends_us = [time.perf_counter() * 1e6]

    def step_ended(self) -> None:
        """One more step."""
        self._ends_us.append(time.perf_counter() * 1e6)
        self._launching_us.append(self._engine.finish_times().launching_us)
        # all at the end would take longer than a GPU has work for
        self._records += self._engine.take_records()

    def end(self) -> None:
        """No more steps; what was read stays until it is taken."""
        self._engine.record(False)
        self._time_lanes(False)

    def forget(self) -> None:
        """No more steps, and what was read is of no use."""
        self.end()
        self.take()

    def take(self) -> ReadSteps:
        """What was read, and what has ended since."""
        read = ReadSteps(tuple(self._ends_us), [*self._records, *self._engine.take_records()], tuple(us for us in self._launching_us if us))
        self._ends_us, self._records = [], []
        return read


@dataclass(frozen=True, slots=True)
class Probes:
    """Rates of what no unit of the model has run yet, timed when they are asked for.

    device_update_us_per_param    of an update on the device
    stream_us_per_param           of copying states to the device and back, both directions busy
    """

    device_update_us_per_param: Callable[[], float]
    stream_us_per_param: Callable[[], tuple[float, float]]


def stream_us_per_param(units: Sequence[Unit], device: torch.device) -> tuple[float, float]:
    """Microseconds per parameter of copying its states to the device and back.

    Both directions are busy.
    """
    to_device, to_host = full_duplex_us_per_byte(device)
    nbytes = sum(unit.stream_bytes for unit in units) / sum(unit.params for unit in units)
    return nbytes * to_device, nbytes * to_host


@dataclass(frozen=True)
class Measured:
    """What was recorded in some steps.

    units        in forward order
    steps        their ends and records
    unit_of, numels, placement    by row of the engine
    """

    units: Sequence[Unit]
    marks: StepMarks
    steps: ReadSteps
    unit_of: Mapping[int, int]
    numels: Mapping[int, int]
    placement: Mapping[int, Placement]
    workers: int
    device: torch.device
    is_stage: bool = False

    @functools.cached_property
    def of_stage(self) -> dict[Stage, list[TaskRecord]]:
        """The records that tell a stage's time, by stage, in order of begin.

        They are of the model's own rows: later rows are probes.
        """
        found: dict[Stage, list[TaskRecord]] = defaultdict(list)
        for record in self.steps.records:
            if record.row in self.placement and self.placement[record.row] in _PLACES[record.stage]:
                found[record.stage].append(record)
        return {stage: sorted(records, key=attrgetter("begin_us")) for stage, records in found.items()}


def build_profile(measured: Measured, probes: Probes, before: Profile | None, *, streams: bool) -> Profile:
    """Costs per unit, in forward order; `streams`: with times for streaming.

    Raises PlanError when no step was measured.
    """
    if measured.marks.steps == 0 or len(measured.steps.ends_us) < 2:
        raise PlanError("no training step has been measured yet: run more steps before solving a plan")
    units = measured.units
    times = measured.marks.median(len(units))
    cpu, gpu, d2h, h2d, stream_in, stream_out = _stages(measured, probes, before, streams)
    profiles = tuple(
        UnitProfile(u.index, u.name, u.params, u.grad_bytes, times.forward_us[i], times.backward_us[i], cpu[i], gpu[i], d2h[i], h2d[i],
                    stream_in[i], stream_out[i], u.param_numels, u.traffic, u.grain_params, fetched_params=u.fetched_params,
                    gathered_params=u.gathered_params)
        for i, u in enumerate(units)
    )
    cuda = measured.device.type == "cuda"
    return Profile(
        profiles,
        device=torch.cuda.get_device_name(measured.device) if cuda else "cpu",
        host=f"{platform.processor() or platform.machine()}, {psutil.cpu_count(logical=False)} cores, {measured.workers} workers",
        versions={"torch": str(torch.__version__), "python": platform.python_version()},
        steps=measured.marks.steps,
        commit_us=_commit_us(measured) if cuda else 0.0,
        launching_us=statistics.median(measured.steps.launching_us) if measured.steps.launching_us else 0.0,
        between_us=times.between_us,
        bubble_us=times.apart_us if measured.is_stage else 0.0,
    )


def _commit_us(measured: Measured) -> float:
    """From the begin of the last backward on the device to the end of step(), when it launched all.

    0 where the thread is there before the device.
    """
    marks = measured.marks.finished()
    reached = len(measured.steps.ends_us) - (measured.marks.steps - len(marks))
    steps = zip(reversed(marks), reversed(measured.steps.ends_us[:reached]), strict=False)
    waited = [end_us - last_backward_begin_us(of_step, end_us) for of_step, end_us in steps]
    return max(statistics.median(waited[: len(measured.steps.ends_us) - 1]), 0.0)


def cpu_steps_us(measured: Measured) -> list[float]:
    """Time of all CPU updates in each measured step, divided among the workers."""
    return [sum(step.values()) for step in _by_step(measured, Stage.CPU_UPDATE)]


def _stages(measured: Measured, probes: Probes, before: Profile | None, streams: bool) -> list[list[float]]:
    params = [unit.params for unit in measured.units]

    def filled(stage: Stage, name: str, rate: Callable[[], float]) -> list[float]:
        earlier = [float(getattr(unit, name)) for unit in before.units] if before is not None and len(before.units) == len(params) else []
        found = _medians(_by_step(measured, stage), _covered(measured, stage), params)
        return _fill(found, params, earlier if any(earlier) else [], rate)

    def nothing() -> float:
        return 0.0

    probed: list[tuple[float, float]] = []  # both directions are probed at once

    def link(direction: int) -> Callable[[], float]:
        def rate() -> float:
            if not probed:
                probed.append(probes.stream_us_per_param())
            return probed[0][direction]

        return rate

    zeros = [0.0] * len(params)
    return [
        filled(Stage.CPU_UPDATE, "cpu_update_us", nothing),
        filled(Stage.GPU_UPDATE, "gpu_update_us", probes.device_update_us_per_param),
        filled(Stage.D2H, "d2h_us", nothing),
        filled(Stage.H2D, "h2d_us", nothing),
        filled(Stage.STREAM_IN, "stream_in_us", link(0)) if streams else zeros,
        filled(Stage.STREAM_OUT, "stream_out_us", link(1)) if streams else zeros,
    ]


def _by_step(measured: Measured, stage: Stage) -> list[dict[int, float]]:
    """Microseconds by unit, for each step.

    CPU workers run side by side, so their time is divided among those that share the updates.

    A step's records are those that begin between its end and the end of the next step: from commit
    to commit. So what a slow device has not reached yet still counts once.
    """
    steps: list[dict[int, float]] = [{} for _ in measured.steps.ends_us[1:]]
    records = measured.of_stage.get(stage, [])
    if stage is Stage.CPU_UPDATE:
        lengths = [us / record.workers for record, us in zip(records, worker_lengths_us(measured, records), strict=True)]
    else:
        lengths = [record.end_us - record.begin_us for record in records]
    for record, us in zip(records, lengths, strict=True):
        step = bisect_right(measured.steps.ends_us, record.begin_us) - 1
        if 0 <= step < len(steps):
            unit = measured.unit_of[record.row]
            steps[step][unit] = steps[step].get(unit, 0.0) + us
    return steps


def worker_lengths_us(measured: Measured, updates: Sequence[TaskRecord]) -> list[float]:
    """How long each of these updates, in order of begin, kept its worker.

    The time starts when the worker could have begun: it was through with the update before, the
    gradient had arrived and the step was committed. A worker that does not run then is held up by
    others, by locks or by the system, and such time is the CPU's cost too.
    """
    arrived: dict[int, list[float]] = {}
    for record in measured.of_stage.get(Stage.D2H, []):
        arrived.setdefault(measured.unit_of[record.row], []).append(record.end_us)
    for ends in arrived.values():
        ends.sort()
    free_us: dict[int, float] = {}
    lengths = []
    for update in updates:
        could_us = max(_ready_us(measured, update, arrived.get(measured.unit_of[update.row], [])), free_us.get(update.worker, 0.0))
        lengths.append(update.end_us - min(could_us, update.begin_us))
        free_us[update.worker] = update.end_us
    return lengths


def _ready_us(measured: Measured, update: TaskRecord, arrivals: Sequence[float]) -> float:
    """When the gradient was there and committed; the update's own begin where that is not known."""
    last = bisect_right(arrivals, update.begin_us) - 1
    step = bisect_right(measured.steps.ends_us, update.begin_us) - 1
    if last < 0 or step < 0:
        return update.begin_us
    if arrivals[last] <= measured.steps.ends_us[step]:
        return measured.steps.ends_us[step]
    # A gradient that came after the last commit. On a GPU that is the rule. On a CPU its own commit
    # has only just begun.
    return arrivals[last] if measured.device.type == "cuda" else update.begin_us


def _covered(measured: Measured, stage: Stage) -> dict[int, int]:
    """By unit: parameters whose rows run this stage."""
    covered: dict[int, int] = {}
    for row, place in measured.placement.items():
        if place in _PLACES[stage]:
            unit = measured.unit_of[row]
            covered[unit] = covered.get(unit, 0) + measured.numels[row]
    return covered


def _medians(steps: Iterable[dict[int, float]], covered: dict[int, int], params: Sequence[int]) -> dict[int, float]:
    """Time of a whole unit, for each unit that ran the stage in most of the steps."""
    rows = list(steps)
    middles = {unit: statistics.median(step.get(unit, 0.0) for step in rows) for step in rows for unit in step}
    return {unit: us * params[unit] / covered.get(unit, params[unit]) for unit, us in middles.items() if us > 0}


def _fill(found: dict[int, float], params: Sequence[int], before: Sequence[float], rate: Callable[[], float]) -> list[float]:
    """Time of every unit.

    Its own; else its time before, changed as the others have; else the others' rate; else `rate()`.
    """
    size = sum(params[unit] for unit in found)
    tells = size >= _TELLING_SHARE * sum(params)
    if before and sum(before) > 0:
        earlier = sum(before[unit] for unit in found)
        change = sum(found.values()) / earlier if tells and earlier > 0 else 1.0
        return [found.get(unit, change * us) for unit, us in enumerate(before)]
    us_per_param = sum(found.values()) / size if found else rate()
    return [found.get(unit, us_per_param * numel) for unit, numel in enumerate(params)]
