"""What is known of one compiled model at one moment.

The plan in force, what it was solved from, what it predicts, what is measured.

Three kinds of figures are kept apart:

    profiled    measured before the plan was solved: what it was solved from
    predicted   simulated from the profiled times
    measured    medians of the last steps, under the plan in force
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import Stream
from hytrain_fx.cost_model.rules import compare
from hytrain_fx.cost_model.simulate import PlayedStep, steady_step
from hytrain_fx.cost_model.step_graph import step_graph, unmeasured
from hytrain_fx.errors import PlanError
from hytrain_fx.explain.plan.what_helps import Binding, Help, KSensitivity, binding_constraint, k_sensitivity, what_helps
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.schedule import Schedule
from hytrain_fx.ir.startup import Startup
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM
from hytrain_fx.ir.task_graph import Resource, TaskGraph, Unit
from hytrain_fx.ir.weights_choice import WeightsChoice
from hytrain_fx.planning.controller import Standing
from hytrain_fx.runtime.engine import EarlyCounts, FinishTimes, GuessCounts
from hytrain_fx.runtime.states.memory_estimate import MemoryInUse

THE_CPU = "the CPU"
"""The name of the device where there is no GPU: what is saved there is in the same memory."""
_RESOURCES = {Resource.GPU: "device", Resource.CPU: "CPU workers", Resource.D2H: "copies to the host", Resource.H2D: "copies to the device"}


@dataclass(frozen=True, slots=True)
class Measured:
    """Times under the plan in force, in microseconds, by unit in forward order.

    forward_us, backward_us, stall_us    medians of the last `steps` steps, from marks on the
                                         compute stream
    cpu_update_us    the last update, its chunks' time divided among the workers; None for a unit
                     that is not updated by the CPU
    step_us          median wall time of the last `step_count` steps; None before the second one
    held_us          of the stalls, what the loop was held up for outside of gates: at graph breaks,
                     and where it reads weights; not for weights from the host
    between_us       what lies between a step's first forward and its last backward, whose times
                     these are: other micro-batches
    apart_us         what lies between that backward and the next step's first forward
    fetch_stall_us   of the stalls, what was waited for weights that come from the host
    finish           when the updates of the step before the last had ended, from its commit on
    """

    steps: int
    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    stall_us: tuple[float, ...]
    cpu_update_us: tuple[float | None, ...]
    step_us: float | None
    step_count: int
    finish: FinishTimes | None = None
    held_us: float = 0.0
    between_us: float = 0.0
    apart_us: float = 0.0
    fetch_stall_us: float = 0.0

    @property
    def compute_us(self) -> float:
        """All forwards and backwards of a step."""
        return sum(self.forward_us) + self.between_us + sum(self.backward_us)

    @property
    def cpu_us(self) -> float | None:
        """CPU updates of all units in a step; None where there are none."""
        found = [us for us in self.cpu_update_us if us is not None]
        return sum(found) if found else None

    @property
    def idle(self) -> dict[str, float]:
        """Shares 0..1 of the step: the device waits for weights, the CPU workers have no update.

        Empty before a step.
        """
        if not self.step_us:
            return {}
        waiting = {"device, waiting for updates": sum(self.stall_us) / self.step_us}
        return waiting if self.cpu_us is None else waiting | {"CPU workers": max(0.0, 1 - self.cpu_us / self.step_us)}


@dataclass(frozen=True)
class Explained:
    """One compiled model at one moment.

    plan, history    the plan in force, and all so far, oldest first
    profile          what was measured before the plan was solved, None before that
    measured         times under the plan in force, None before a step has run under it
    planning         what planning does now and why
    library          where the engine's library comes from, None for an engine without one
    discipline       how updates are ordered and gated in what is predicted
    node_runs        rows that each kind of inserted node was run for (`backward_end`: runs)
    not_offloaded    parameter name -> why its gradient does not go to the host inside a graph
    spent_us         what was done once: passes, solving
    startup          time from compile() to the first full-speed step, by phase
    optimizer        how updates run that are not Adam's or AdamW's, in sentences
    guesses          updates that began before the factors of their gradients were known, and those
                     made again
    early            updates that began before step(), and those put back or made again
    early_tried      what timing steps with such updates and without has shown, in a sentence
    stream           as `compile` was told
    copies           how many fp32 weights the device has in 16 bits, in a sentence
    streamed         how many weights rest on the host, and the device's slots for them, in a
                     sentence
    weights_choice   where weights="auto" has weights rest, and why; None where that was given
    nonfinite        how many steps were left out because gradients held NaN or infinities, in a
                     sentence
    outside          what ran outside captured graphs, and what that costs, in sentences
    attention        a mask that attention may not need, in a sentence
    troubles         errors in measuring and planning that training went on without
    launch_queue     what CUDA_SCALE_LAUNCH_QUEUES says, None where the GPU's queue of launches has
                     its usual length
    units            the model's units, with floating-point operations as far as graphs are captured
    kept_bytes       by unit: what the forward keeps for its backward, as far as graphs are captured
    """

    plan: Plan
    history: tuple[Plan, ...]
    profile: Profile | None
    measured: Measured | None
    memory: MemoryInUse
    engine: str
    workers: int
    steps_done: int
    device: str
    library: str | None = None
    discipline: Discipline = field(default_factory=Discipline)
    node_runs: Mapping[str, int] = field(default_factory=dict)
    not_offloaded: Mapping[str, str] = field(default_factory=dict)
    spent_us: Mapping[str, float] = field(default_factory=dict)
    startup: Startup | None = None
    optimizer: tuple[str, ...] = ()
    guesses: GuessCounts | None = None
    early: EarlyCounts | None = None
    early_tried: str | None = None
    stream: Stream = "auto"
    copies: str | None = None
    streamed: str | None = None
    weights_choice: WeightsChoice | None = None
    nonfinite: str | None = None
    outside: tuple[str, ...] = ()
    attention: str | None = None
    troubles: tuple[str, ...] = ()
    launch_queue: str | None = None
    planning: Standing | None = None
    units: tuple[Unit, ...] = ()
    kept_bytes: tuple[int, ...] = ()

    @cached_property
    def rules(self) -> dict[str, Plan]:
        """The plans of all rules, of k=0 and of k=n on the profile.

        Empty before anything is profiled.
        """
        if self.profile is None:
            return {}
        budget = self.plan.inputs.get("budget_bytes")
        per_param = self.plan.inputs.get("state_bytes_per_param", STATE_BYTES_PER_PARAM)
        counts = bool(self.plan.inputs.get("budget_counts_streamed", True))
        return compare(self.profile, None if budget is None else int(budget), state_bytes_per_param=per_param,
                       budget_counts_streamed=counts, discipline=self.discipline)

    @cached_property
    def step(self) -> PlayedStep | None:
        """The plan in force, played.

        None before anything is profiled and for plans that are not simulated.
        """
        if self.profile is None:
            return None
        try:
            return steady_step(self.profile, self.plan, self.discipline, self.units)
        except PlanError:
            return None

    @property
    def schedule(self) -> Schedule | None:
        """The predicted schedule of the plan in force; None where it is not played."""
        return self.step.schedule if self.step else None

    @property
    def task_graph(self) -> TaskGraph:
        """The tasks of a step under the plan in force; they take no time where it is not played."""
        return self.step.graph if self.step else step_graph(unmeasured(self.units), self.plan, self.discipline, self.units)

    @cached_property
    def binding(self) -> Binding | None:
        """What sets the length of the step.

        It is predicted, so None before anything is profiled.
        """
        if self.profile is None or self.step is None:
            return None
        return binding_constraint(self.profile, self.plan, self.step, self.discipline)

    @property
    def binds(self) -> str | None:
        """The same in one sentence."""
        return None if self.binding is None else str(self.binding)

    @property
    def idle(self) -> dict[str, float]:
        """Predicted share 0..1 of the step in which each resource has nothing to do.

        Empty before anything is profiled.
        """
        if self.schedule is None:
            return {}
        found = {name: self.schedule.idle_share(resource) for resource, name in _RESOURCES.items()}
        memory = self.plan.predicted.get("host_memory_idle_share")
        return found if memory is None else found | {"host memory": memory}

    @cached_property
    def helps(self) -> list[Help]:
        """What would shorten the step, the most first; empty before anything is profiled.

        The plan is solved again for each change.
        """
        return [] if self.profile is None else what_helps(self.profile, self.plan, self.discipline, self.stream)

    @cached_property
    def k_sensitivity(self) -> KSensitivity | None:
        """How HyTrainDNN's k for equal layers moves with its terms.

        None before anything is profiled.
        """
        return None if self.profile is None else k_sensitivity(self.profile)

    @property
    def alpha(self) -> float | None:
        """Update time on the device over update time on the CPU, profiled."""
        return None if self.profile is None else self.profile.alpha
