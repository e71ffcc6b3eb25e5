"""When a plan is made and put in force: before the first step from what memory allows, after the warm-up from measured times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hytrain_fx.cost_model.planner import plan as solve
from hytrain_fx.cost_model.planner import predict, prefix_plan
from hytrain_fx.cost_model.simulate import Discipline
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan, validate
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import TaskGraph, Unit, build_task_graph
from hytrain_fx.profiling import build_profile
from hytrain_fx.runtime.memory import device_budget_bytes, host_budget_bytes

if TYPE_CHECKING:
    from hytrain_fx.session import Session

# A plan that is not at least this much faster is not worth moving states for.
_MIN_GAIN = 0.01
# The first step compiles, the second is still cold: neither is measured.
_COLD_STEPS = 2


class Planning:
    """The plans of one session: which is in force, what it was made from, when the next is due."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.profile: Profile | None = None
        self.history: list[Plan] = []
        self.solve_us = 0.0
        self.recording = False  # inside hytrain_fx.record(): the engine's records are the user's, so no plan is made from them
        self._due = self._renumbered = self._measuring = False
        self._measured_steps = 0

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.history[-1]

    @property
    def steps_to_measure(self) -> int:
        """Steps before the first plan is solved: cold ones, then those that are measured."""
        return _COLD_STEPS + self._session.config.warmup_steps

    def units(self) -> tuple[Unit, ...]:
        """The units as the planner sees them: forward order once a forward graph is captured, order of registration before."""
        session = self._session
        order = session.capture.unit_order if hasattr(session, "capture") else tuple(unit.number for unit in session.units)
        return tuple(self._unit(index, number) for index, number in enumerate(order))

    def task_graph(self) -> TaskGraph:
        """The layer-level DAG of a step, with sizes and floating-point operations."""
        return build_task_graph(self.units())

    def first_placement(self) -> list[Placement]:
        """Where states rest until times are measured: as told, else on the host as far as it holds them."""
        session, units = self._session, self.units()
        if session.config.plan is not None:
            plan = session.config.plan
        elif session.config.k != "auto":
            k = min(session.config.k, len(units))
            plan = prefix_plan(units, k, source="fixed k", reason=lambda unit: f"k={session.config.k} was given")
        else:
            plan = self._until_measured(units)
        self.history.append(plan)
        return self.placement_of(plan)

    def _until_measured(self, units: Sequence[Unit]) -> Plan:
        session = self._session
        limit = host_budget_bytes(session.config.host_memory)
        left = [session.states.host_bytes(self._rows_of(unit)) for unit in units]
        k = 0
        while k < len(units) and sum(left[k:]) > limit:
            k += 1
        fits = f"the host's {limit / 2**30:.1f} GiB hold the states of the last {len(units) - k} units"
        why = "times are not measured yet" if k == 0 else fits
        return prefix_plan(units, k, source="first steps", reason=lambda unit: why)

    def placement_of(self, plan: Plan) -> list[Placement]:
        """Placement by row: of the share that holds the row's first element (states of one tensor are not split yet)."""
        session, units = self._session, self.units()
        validate(plan, units)
        placement = [Placement.CPU] * len(session.table)
        for unit in units:
            at, shares = 0, plan.shares(unit.index)
            for row in self._rows_of(unit):
                placement[row] = next(share.placement for share in shares if share.begin <= at < share.end)
                at += session.table.parameters[row].numel()
        return placement

    def after_step(self) -> None:
        """Decide whether the next forward begins with a new plan, and whether the step to come is measured for one."""
        if self.recording:
            return
        session, done, first = self._session, self._session.steps_done, self.steps_to_measure
        every = session.config.replan_every if self._solves else 0
        self._measured_steps += self._measuring
        self._due = done == first or (every > 0 and done > first and (done - first) % every == 0)
        # The forward order is known now; a given k counts units in it, and it may differ from the order of registration.
        self._renumbered = done == 1 and session.config.plan is None and not self._solves
        left = first - done if done < first else every - (done - first) % every if every else 0
        measure = done >= _COLD_STEPS and 0 < left <= session.config.warmup_steps
        if measure and not self._measuring:
            session.engine.take_records()
            session.marks.clear()
            self._measured_steps = 0
        self._measuring = measure
        session.engine.record(measure)  # records cost memory: they are on only in steps that are read

    def before_forward(self) -> None:
        """Put a due plan in force, if no gradient is alive (it would lose its slot)."""
        session = self._session
        if not (self._due or self._renumbered) or self.recording or any(p.grad is not None for p in session.table.parameters):
            return
        begin_s = time.perf_counter()
        if self._due:
            session.drain()
            self.profile = build_profile(session, self._measured_steps)
        new = self._next_plan()
        self._due = self._renumbered = False
        self.solve_us = (time.perf_counter() - begin_s) * 1e6
        if new is not None:
            session.place(new)
            self.history.append(new)
            session.marks.clear()

    @property
    def _solves(self) -> bool:
        return self._session.config.plan is None and self._session.config.k == "auto"

    @property
    def discipline(self) -> Discipline:
        """How this runtime orders and gates updates on this device, for predictions."""
        # On a GPU step() is reached early in the backward; a CPU has run the backward when step() is called.
        on_gpu = self._session.table.device.type == "cuda"
        return Discipline(commit_at="backward_start" if on_gpu else "backward_end")

    def _next_plan(self) -> Plan | None:
        config, units = self._session.config, self.units()
        if self._solves:
            assert self.profile is not None
            return self._solve(self.profile)
        if self.profile is None:
            k = min(int(config.k), len(units))
            return prefix_plan(units, k, source="fixed k", reason=lambda unit: f"k={config.k} was given")
        per_param = self._device_bytes_per_param()
        if config.plan is not None:
            return replace(self.plan, predicted=predict(self.profile, self.plan, per_param, self.discipline))
        return solve(self.profile, k=min(int(config.k), len(units)), state_bytes_per_param=per_param, discipline=self.discipline)

    def _solve(self, profile: Profile) -> Plan | None:
        session = self._session
        per_param = self._device_bytes_per_param()
        budget = device_budget_bytes(session.config.gpu_states, session.table.device, profile.params * per_param, self._resident_bytes())
        try:
            new = solve(
                profile,
                rule=session.config.planner,
                budget_bytes=int(budget),
                host_budget_bytes=self._resident_host_bytes() + host_budget_bytes(session.config.host_memory),
                state_bytes_per_param=per_param,
                discipline=self.discipline,
            )
        except PlanError:
            if self.plan.source == "first steps":
                raise
            return None  # the plan in force stays: memory has become too short to move to another
        if self.plan.source == "first steps" or new.k == self.plan.k:
            return new
        present = predict(profile, self.plan, per_param, self.discipline)["step_us"]
        return new if new.predicted["step_us"] <= (1 - _MIN_GAIN) * present else None

    def _resident_bytes(self) -> int:
        session = self._session
        return session.states.device_bytes(row for row, place in enumerate(session.states.placement) if place is Placement.GPU)

    def _resident_host_bytes(self) -> int:
        session = self._session
        if session.config.host_memory is not None:
            return 0
        return session.states.host_bytes(row for row, place in enumerate(session.states.placement) if place is Placement.CPU)

    def _device_bytes_per_param(self) -> float:
        """States, and the gradient that stays on the device until its update has run."""
        session = self._session
        rows = range(len(session.table))
        grads = sum(p.numel() * p.element_size() for p in session.table.parameters)
        return (session.states.device_bytes(rows) + grads) / sum(p.numel() for p in session.table.parameters)

    def _rows_of(self, unit: Unit) -> tuple[int, ...]:
        rows = self._session.table.names
        return tuple(rows.index(name) for name in unit.param_names)

    def _unit(self, index: int, number: int) -> Unit:
        session = self._session
        unit = session.units[number]
        parameters = [session.table.parameters[row] for row in unit.rows]
        flops = {"forward": 0.0, "backward": 0.0}
        for graph in session.capture.graphs if hasattr(session, "capture") else ():
            if graph.kind in flops:
                flops[graph.kind] = max(flops[graph.kind], graph.unit_flops.get(number, 0.0))
        return Unit(
            index=index,
            name=unit.name or "(model)",
            params=sum(p.numel() for p in parameters),
            param_names=tuple(session.table.names[row] for row in unit.rows),
            grad_bytes=sum(p.numel() * p.element_size() for p in parameters),
            forward_flops=flops["forward"],
            backward_flops=flops["backward"],
        )
