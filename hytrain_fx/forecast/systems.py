"""Ways to run that a report compares, on one machine's rates.

Each is a rule for k and a discipline of the runtime.

They are models of the ideas: every system has the same kernels, copies and memory layout, so that
what differs is the schedule.

    ZeRO-Offload              backward, gradient copies, CPU updates, weight copies, one after the
                              other; no state on the device
    CoTrain, HyTrainDNN       their k; updates beside the backward, the forward waits for all of
                              them
    Deep Optimizer States     updates after the backward, CPU and streamed ones interleaved in the
                              best ratio, residents kept
    windows                   each layer's forward waits for its own update

With moments in bf16 only systems whose layers wait each for its own update have them: those are
this library's. The others keep fp32 ones. It is the same with streamed and sharded weights: the
others' are whole on the device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from hytrain_fx.cost_model.discipline import Barrier, CommitAt, Discipline
from hytrain_fx.cost_model.planner import Rule, Stream, plan
from hytrain_fx.errors import PlanError
from hytrain_fx.forecast.device import DeviceSpec, analytic_profile
from hytrain_fx.forecast.memory import HOST_SHARE, STAGING_BYTES_PER_PARAM, Footprint, footprint, states_budget_bytes
from hytrain_fx.forecast.ranks import ONE_RANK, Ranks
from hytrain_fx.forecast.shapes import ModelShape
from hytrain_fx.forecast.workers import filling_workers, with_best_workers, workers_of_rank
from hytrain_fx.ir.limits import CHUNK_PARAMS
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM


@dataclass(frozen=True, slots=True)
class System:
    """One way to run: which rule or fixed share of units decides k, when updates may begin, where
    the forward waits, and whether states may be streamed.
    """

    name: str
    rule: Rule | None
    share: float
    barrier: Barrier
    stream: Stream = 0.0
    commit_at: CommitAt = "backward_start"

    @property
    def is_ours(self) -> bool:
        """Whether this library runs so: each layer waits for its own update."""
        return self.barrier == "none"


OURS = "windows, states streamed too"
ALL_ON_DEVICE = "all on the device"
ZERO_OFFLOAD = "ZeRO-Offload, no overlap"
SYSTEMS = (
    System(ZERO_OFFLOAD, None, 0.0, "zero_offload"),
    System("CoTrain k, one barrier", "cotrain", 0.0, "before_forward"),
    System("HyTrainDNN k, one barrier", "seed", 0.0, "before_forward"),
    System("HyTrainDNN k, waits per layer", "seed", 0.0, "none"),
    System("windows, waits per layer", "windowed", 0.0, "none"),
    System(OURS, "windowed", 0.0, "none", "auto"),
    System("Deep Optimizer States, after the backward", "windowed", 0.0, "before_forward", "auto", "backward_end"),
    System(ALL_ON_DEVICE, None, 1.0, "none"),
)
OUR_SYSTEM = next(system for system in SYSTEMS if system.name == OURS)
_COARSE_CHUNKS = 240  # chunks of a model that are played where many cases are


@dataclass(frozen=True, slots=True)
class Row:
    """What one system is predicted to take. `fits` tells whether both tiers hold `memory`;
    `stream_share` is of what is not resident; `idle_shares` of the step, by resource: gpu, cpu,
    d2h, h2d and, where its bandwidth is known, host_memory. `workers` threads of each rank update.
    """

    system: str
    k: int
    stream_share: float
    step_us: float
    stall_us: float
    gpu_update_us: float
    idle_shares: dict[str, float]
    memory: Footprint
    fits: bool
    notes: tuple[str, ...]
    workers: int


@dataclass(frozen=True)
class Case:
    """One model on one machine with one micro-batch, and what the systems may use of it.

    profile          its times, from the machine's rates
    budget_bytes     device memory for resident states
    given_bytes      the budget as it was given, None = what the device has left, for streamed
                     gradients too
    coarse           the runtime is simulated in few pieces: a model of 70 G parameters takes no
                     longer
    ranks            how many train it; plans, profile and budget are of one of them
    all_workers      plans are for all of the machine's, as in a run without the option, and not for
                     as many as make the step shortest
    """

    shape: ModelShape
    device: DeviceSpec
    tokens: int
    sequence: int
    recompute: bool
    given_bytes: int | None
    profile: Profile
    budget_bytes: int
    coarse: bool = False
    ranks: Ranks = ONE_RANK
    all_workers: bool = False

    @classmethod
    def of(
        cls, shape: ModelShape, device: DeviceSpec, tokens: int, sequence: int, recompute: bool, given_bytes: int | None,
        ranks: Ranks = ONE_RANK,
    ) -> Case:
        """The case with the profile and the budget that the device's figures give."""
        profile = analytic_profile(shape, device, tokens, recompute, sequence=min(sequence, tokens), ranks=ranks)
        budget = states_budget_bytes(shape, device, tokens, recompute, ranks) if given_bytes is None else given_bytes
        return cls(shape, device, tokens, sequence, recompute, given_bytes, profile, budget, ranks=ranks)

    def remade(self, **changed: Any) -> Case:
        """The same case with another shape, device, micro-batch or recomputation.

        Itself where nothing is another, so that its plans are solved once.
        """
        if all(getattr(self, name) == value for name, value in changed.items()):
            return self
        asked = {name: getattr(self, name) for name in ("shape", "device", "tokens", "sequence", "recompute", "given_bytes", "ranks")}
        return replace(Case.of(**{**asked, **changed}), coarse=self.coarse)

    @property
    def chunk_params(self) -> int:
        """The grain of the simulated runtime, in parameters."""
        return max(CHUNK_PARAMS, self.profile.params // _COARSE_CHUNKS) if self.coarse else CHUNK_PARAMS

    def seen_by(self, system: System) -> Case:
        """The case as the system has it: others keep fp32 moments and all weights on the device."""
        return self if system.is_ours else self._of_others

    @functools.cached_property
    def _of_others(self) -> Case:
        return self.remade(shape=replace(self.shape, moments="fp32", weights="resident"))

    def plan_of(self, system: System) -> Plan:
        """The system's plan, solved once.

        Where the host cannot hold what it leaves there, it is the plan that it would want.
        """
        if system.name not in self._plans:
            self._plans[system.name] = self.seen_by(system)._solved(system)
        return self._plans[system.name]

    @functools.cached_property
    def _plans(self) -> dict[str, Plan]:
        return {}

    @functools.cached_property
    def in_coarse_pieces(self) -> Case:
        """The same case with `coarse`."""
        return replace(self, coarse=True)

    def _solved(self, system: System) -> Plan:
        if system.rule is None:  # a system without a choice: it is shown even where it does not fit
            return self.plan_at(system, round(system.share * len(self.profile.units)))
        discipline = self._discipline(system)

        def within(host_budget_bytes: int | None, profile: Profile) -> Plan:
            return plan(
                profile, rule=system.rule or "windowed", stream=system.stream, budget_bytes=self.budget_bytes,
                host_budget_bytes=host_budget_bytes, budget_counts_streamed=self.given_bytes is None, discipline=discipline,
                staged_bytes_per_param=STAGING_BYTES_PER_PARAM, **self._state_bytes)

        def solved(profile: Profile) -> Plan:
            try:
                return within(int(HOST_SHARE * self.device.host_memory_bytes / self.ranks.gpus), profile)
            except PlanError:
                return within(None, profile)

        if self.all_workers:
            return self._noted(solved(self.profile))
        # Others gain nothing with fewer where all do not fill the memory. Those that stream gain
        # about 1%.
        crowded = filling_workers(self.profile, self.workers) < self.workers and not system.stream
        fewer = not self.coarse and (system == OUR_SYSTEM or crowded)
        return self._noted(with_best_workers(self.profile, self.workers, solved, fewer=fewer))

    @property
    def workers(self) -> int:
        """CPU threads of one rank, as many as the machine has for it."""
        return workers_of_rank(self.device, self.ranks)

    def plan_at(self, system: System, k: int) -> Plan:
        """The plan with a given k, nothing streamed."""
        of = self.seen_by(system)
        return of._noted(with_best_workers(of.profile, of.workers, lambda profile: plan(
            profile, k=k, discipline=of._discipline(system), **of._state_bytes), k=k))

    @property
    def _state_bytes(self) -> dict[str, Any]:
        """Of a parameter, as the planner's arguments."""
        return dict.fromkeys(("state_bytes_per_param", "host_state_bytes_per_param"), self.shape.state_bytes_per_param)

    def _noted(self, made: Plan) -> Plan:
        """The plan, which says so where it is one rank's, and where moments rest in bf16."""
        notes = list(made.notes)
        if self.ranks.count > 1:
            notes.append(f"the plan of one rank on {self.ranks.words}: rows count the parameters of its shards, vectors as cut; it is to "
                         "be read, each rank solves its own")
        if self.shape.moments != "fp32":
            notes.append(f"made for compile(..., moments=\"{self.shape.moments}\"): {self.shape.state_bytes_per_param} bytes of master and "
                         f"states a parameter. With fp32 moments they are {STATE_BYTES_PER_PARAM}, and this placement takes more memory")
        if self.shape.weights != "resident":
            where = {"streamed": "the weights that the CPU updates rest on the host", "sharded": "each rank has its shards of the weights",
                     "sharded_host": "each rank has its shards of the weights, those that the CPU updates on the host"}
            notes.append(f"made for compile(..., weights=\"{self.shape.weights}\"): {where[self.shape.weights]}")
        return replace(made, notes=tuple(notes))

    def _discipline(self, system: System) -> Discipline:
        return Discipline(barrier=system.barrier, commit_at=system.commit_at, chunk_params=self.chunk_params)

    def row_of(self, system: System, made: Plan) -> Row:
        """What the system's plan costs."""
        streamed = made.numel(Placement.STREAM)
        memory = footprint(self.seen_by(system).shape, self.tokens, made.k, self.recompute, streamed, self.ranks)
        share = streamed / max(made.numel(Placement.CPU) + streamed, 1)
        p = made.predicted
        idle = {name.removesuffix("_idle_share"): value for name, value in p.items() if name.endswith("_idle_share")}
        told = ("capped", "raised", *(("predicted with",) if system.is_ours else ()))
        notes = tuple(note for note in made.notes if note.startswith(told))
        return Row(system.name, made.k, share, p["step_us"], p["stall_us"], p["gpu_update_us"], idle, memory, memory.fits(self.device),
                   notes, int(made.inputs.get("workers", self.workers)))
