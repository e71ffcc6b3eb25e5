"""Ways to train a model that is large beside one GPU, on one machine, side by side.

    resident    weights on every GPU, states in shards (`compile` with several ranks)
    sharded     weights in shards, too, on the GPUs or on the host (`weights="sharded"` and
                "sharded_host")
    pipeline    a stage on each GPU (`pipeline=schedule`), 1F1B
    streamed    weights on the host (`weights="streamed"`): one GPU, with the whole host to itself

Each GPU's part of a step is one micro-batch of `tokens`; a pipeline cuts what all GPUs have into
micro-batches of its own, `sequence` tokens each. Plans are solved for each way within its memory.
The host's memory is shared out evenly among ranks, and so are its cores and bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hytrain_fx.config import Weights
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import plan as solve
from hytrain_fx.errors import ConfigError, PlanError
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.memory import (
    DEVICE_SHARE,
    GRAD_BYTES,
    HOST_SHARE,
    SLOT_BYTES,
    STAGING_BYTES_PER_PARAM,
    WEIGHT_BYTES,
    Footprint,
    kept_bytes,
    recomputed_bytes,
)
from hytrain_fx.forecast.ranks import Ranks
from hytrain_fx.forecast.report import case_of
from hytrain_fx.forecast.shapes import ModelShape
from hytrain_fx.forecast.stages import in_stages
from hytrain_fx.forecast.systems import OUR_SYSTEM, Case
from hytrain_fx.forecast.workers import with_best_workers, workers_of_rank
from hytrain_fx.ir.figures import Table, bytes_text, count_text, time_text
from hytrain_fx.ir.limits import CHUNK_PARAMS, STAGING_SLOTS
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile

_COARSE_CHUNKS = 240  # chunks of a stage that are played
_FREE = 0.02
"""By such a share updates may lengthen a pipeline's step before they are what it waits for."""
_LANES = {"gpu": "the GPU", "cpu": "the host's cores", "host_memory": "the host's memory", "d2h": "the link to the host",
          "h2d": "the link from the host", "collectives": "the links between GPUs"}


@dataclass(frozen=True, slots=True)
class OfRank:
    """Bytes of one rank: of its device, and what it takes of the host."""

    device_bytes: float
    host_bytes: float


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train on the machine.

    gpus       that it uses
    tokens     of all of them, in a step
    step_us    predicted; of a way that does not fit, were there room; 0 where there is no such way
    binds      what a step waits for, in words; where it does not fit, what is too small
    ranks      by rank
    resident, streamed    shares of the states: on the devices, and those that visit them
    workers    CPU threads that update, by rank
    """

    name: str
    gpus: int
    tokens: int
    step_us: float
    binds: str
    fits: bool
    ranks: tuple[OfRank, ...]
    resident: float
    streamed: float
    workers: tuple[int, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Of the whole machine."""
        return 1e6 * self.tokens / self.step_us if self.step_us else 0.0


@dataclass(frozen=True, slots=True)
class Ways:
    """All of them, of one model on one machine.

    active   parameters that a token is multiplied with, of `params`
    """

    model: str
    params: int
    active: int
    machine: str
    tokens: int
    sequence: int
    ways: tuple[Way, ...]


def ways_table(found: Sequence[Ways]) -> Table:
    """Model by model, machine by machine, way by way; bytes by rank, in 10^9."""
    heads = ("model", "machine", "way", "tokens/s", "step", "states on the GPUs", "GB of each GPU", "GB of the host, by rank",
             "CPU workers, by rank", "what it waits for")
    rows = tuple((of.model, of.machine, way.name, *_figures(way)) for of in found for way in of.ways)
    sizes = dict.fromkeys(f"{of.model} has {count_text(of.params)} parameters, a token meets {count_text(of.active)}" for of in found)
    asked = dict.fromkeys(f"{of.tokens:,} tokens of each GPU in a step, in sequences of {of.sequence:,}" for of in found)
    return Table(f"Ways to train: {'; '.join(asked)}", heads, rows, (f"{'; '.join(sizes)}. {_REMARK}",), words=(0, 1, 2, 9))


_REMARK = ("All is predicted. States that are not on the GPUs rest on the host; those that visit the GPU to be updated are counted there. "
           "Sending activations from stage to stage is left out. Streamed weights use one GPU and the whole host.")


def _figures(way: Way) -> tuple[str, ...]:
    times = (f"{way.tokens_per_s:,.0f}", time_text(way.step_us)) if way.fits else ("-", "-")
    memory = (_by_rank(of.device_bytes for of in way.ranks), _by_rank(of.host_bytes for of in way.ranks))
    workers = _same_or_each(map(str, way.workers)) if way.fits else "-"
    return (*times, f"{way.resident:.0%}", *memory, workers, way.binds if way.fits else f"does not fit: {way.binds}")


def _by_rank(nbytes: Iterable[float]) -> str:
    return _same_or_each(f"{one / 1e9:.0f}" for one in nbytes)


def _same_or_each(by_rank: Iterable[str]) -> str:
    each = list(by_rank)
    return each[0] if len(set(each)) == 1 else " ".join(each)


def ways_of(
    model: ModelShape | str, device: DeviceSpec | str, gpus: int, tokens: int, *, sequence: int | None = None, recompute: bool = False
) -> Ways:
    """Predict every way. `model`, `device` and the rest are as of `report`; nothing is run.

    tokens   in a step, of each GPU

    Raises ConfigError for one GPU, and as `case_of` does.
    """
    ranks = Ranks(gpus)
    if ranks.count == 1:
        raise ConfigError("found one GPU, expected several: `report --weights streamed` is about one")
    case = case_of(model, device, tokens, sequence=sequence, recompute=recompute, ranks=ranks)
    alone = case_of(case.shape, case.device, tokens, sequence=sequence, recompute=recompute, weights="streamed")
    found = (_played("resident weights", case, "resident"), _played("sharded weights", case, "sharded"),
             _played("shards on the host", case, "sharded_host"), _pipeline(case),
             _played("streamed weights, on one GPU", alone, "streamed"))
    active = sum(unit.matmul_params for unit in case.shape.units)
    return Ways(case.shape.name, case.shape.params, active, f"{gpus} x {case.device.name}", tokens, case.sequence, found)


def _played(name: str, case: Case, weights: Weights) -> Way:
    """Weights of all ranks, or of the one, rest there; the simulator plays what brings them."""
    of = case.remade(shape=replace(case.shape, weights=weights))
    plan = of.plan_of(OUR_SYSTEM)
    return _alike(name, of, plan, of.row_of(OUR_SYSTEM, plan).memory)


def _alike(name: str, case: Case, plan: Plan, memory: Footprint) -> Way:
    """A way whose ranks are all alike. `memory`: the host's is of all of them."""
    gpus = case.ranks.gpus
    each = OfRank(memory.device_bytes, memory.host_bytes / gpus)
    too_small = _too_small(case.device, [each] * gpus)
    resident, streamed = (plan.numel(where) / sum(row.numel for row in plan.rows) for where in (Placement.GPU, Placement.STREAM))
    return Way(name, gpus, gpus * case.tokens, plan.predicted["step_us"], too_small or _busiest(plan), not too_small, (each,) * gpus,
               resident, streamed, (int(plan.inputs["workers"]),) * gpus)


# ---- a pipeline ----


def _pipeline(case: Case) -> Way:
    """A stage on each GPU; every one has its share of the host."""
    gpus, micro_tokens = case.ranks.gpus, min(case.sequence, case.tokens)
    micro_batches = gpus * case.tokens // micro_tokens
    profile = case_of(case.shape, case.device, micro_tokens, sequence=micro_tokens, recompute=case.recompute).profile
    units = tuple(replace(unit, cpu_update_us=gpus * unit.cpu_update_us) for unit in profile.units)  # each has so much of the cores
    name = f"{gpus} stages, {micro_batches} micro-batches"
    try:
        period_us, stages = in_stages(replace(profile, units=units, node_ranks=gpus), gpus, micro_batches)
    except ConfigError as error:  # the model has fewer layers; other ways may go
        return Way(name, gpus, micro_batches * micro_tokens, 0.0, str(error), False, (OfRank(0.0, 0.0),) * gpus, 0.0, 0.0)
    solved = [_Stage.of(case, begin, own, min(gpus - number, micro_batches), micro_tokens) for number, (begin, own) in enumerate(stages)]
    slowest = max(solved, key=lambda stage: stage.plan.predicted["step_us"])
    step_us = slowest.plan.predicted["step_us"]
    ranks = tuple(stage.memory for stage in solved)
    params = case.shape.params
    resident, streamed = (sum(stage.plan.numel(where) for stage in solved) / params for where in (Placement.GPU, Placement.STREAM))
    too_small = _too_small(case.device, ranks)
    idle = 1 - micro_batches * (profile.forward_us + profile.backward_us) / (gpus * period_us)
    waits = f"the GPU, {idle:.0%} of whose time is bubble" if step_us <= (1 + _FREE) * period_us else (
        f"{_adds(slowest.plan, step_us - period_us)} of stage {solved.index(slowest)}")
    return Way(name, gpus, micro_batches * micro_tokens, max(step_us, period_us),
               too_small or waits, not too_small, ranks, resident, streamed, tuple(int(stage.plan.inputs["workers"]) for stage in solved))


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage with its plan and its memory."""

    profile: Profile
    plan: Plan
    memory: OfRank

    @classmethod
    def of(cls, case: Case, begin: int, own: Profile, in_flight: int, micro_tokens: int) -> _Stage:
        """The stage from unit `begin` on, with so many micro-batches between their two passes."""
        kept = kept_bytes(case.shape, micro_tokens, case.recompute)[begin : begin + len(own.units)]
        inside = recomputed_bytes(case.shape, micro_tokens, case.recompute)
        fixed_bytes = (WEIGHT_BYTES + GRAD_BYTES) * own.params + in_flight * sum(kept) + inside
        staging_bytes = STAGING_SLOTS * CHUNK_PARAMS * STAGING_BYTES_PER_PARAM
        device_bytes = max(0, int(DEVICE_SHARE * case.device.memory_bytes - fixed_bytes - staging_bytes))
        host_bytes = int(HOST_SHARE * case.device.host_memory_bytes / case.ranks.gpus)
        plan = with_best_workers(own, workers_of_rank(case.device, case.ranks), lambda profile: _solved(
            profile, device_bytes, host_bytes, case.shape.state_bytes_per_param))
        resident, visits, by_cpu = (plan.numel(where) for where in (Placement.GPU, Placement.STREAM, Placement.CPU))
        states, staged_bytes = case.shape.state_bytes_per_param, staging_bytes if visits else 0
        return cls(own, plan, OfRank(fixed_bytes + states * resident + staged_bytes, states * (visits + by_cpu) + SLOT_BYTES * by_cpu))


def _solved(own: Profile, device_bytes: int, host_bytes: int, state_bytes: int) -> Plan:
    """The stage's plan; the one that it would want, where its memories do not hold it."""
    discipline = Discipline(chunk_params=max(CHUNK_PARAMS, own.params // _COARSE_CHUNKS))
    # Gradients are there whole already, so streamed ones take no more of the budget.
    within = partial(solve, own, stream="auto", budget_bytes=device_bytes, budget_counts_streamed=False, state_bytes_per_param=state_bytes,
                     host_state_bytes_per_param=state_bytes, staged_bytes_per_param=STAGING_BYTES_PER_PARAM, discipline=discipline)
    try:
        return within(host_budget_bytes=host_bytes)
    except PlanError:
        return within(host_budget_bytes=None)


# ---- what is too small, or at work for longest ----


def _too_small(device: DeviceSpec, ranks: Sequence[OfRank]) -> str:
    """Which memory does not hold its part, with a margin; empty where both do."""
    asked = (("device", max(of.device_bytes for of in ranks), DEVICE_SHARE * device.memory_bytes),
             ("host", sum(of.host_bytes for of in ranks), HOST_SHARE * device.host_memory_bytes))
    found = [f"{where} memory, {bytes_text(needed)} of {bytes_text(usable)}"
             for where, needed, usable in asked if needed > usable]
    return "; ".join(found)


def _busiest(plan: Plan) -> str:
    """What stands idle for the least of the step."""
    return _least_idle(plan, _LANES)


def _adds(plan: Plan, added_us: float) -> str:
    """What lengthens a stage's step by so much: updates on the GPU, or what others wait for."""
    if plan.predicted["gpu_update_us"] >= (1 - _FREE) * added_us:
        return "updates by the GPU"
    return _least_idle(plan, [lane for lane in _LANES if lane != "gpu"])


def _least_idle(plan: Plan, lanes: Iterable[str]) -> str:
    idle = {lane: plan.predicted[f"{lane}_idle_share"] for lane in lanes if f"{lane}_idle_share" in plan.predicted}
    return _LANES[min(idle, key=idle.__getitem__)]
