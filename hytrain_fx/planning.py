"""When a plan is made and put in force: before the first step from what memory allows, after the warm-up from measured times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hytrain_fx.cost_model.planner import plan as solve
from hytrain_fx.cost_model.planner import prefix_plan
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
        self._due = False

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
        why = "times are not measured yet" if k == 0 else f"the host's {limit / 2**30:.1f} GiB hold the states of the last {len(units) - k} units"
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
        """Decide whether the next forward should begin with a new plan; record the steps before it."""
        session, config = self._session, self._session.config
        if config.k != "auto" or config.plan is not None:
            self._due = session.steps_done == 1  # the forward order is known now; it may differ from that of registration
            return
        if self.recording:
            return
        every = config.replan_every
        since = session.steps_done - config.warmup_steps - _COLD_STEPS
        self._due = since == 0 or (every > 0 and since > 0 and since % every == 0)
        if session.steps_done == _COLD_STEPS:
            session.marks.clear()
        # The engine's records cost memory, so they are on only in the steps that are read.
        session.engine.record(-config.warmup_steps <= since < 0 or (every > 0 and since > 0 and (since + config.warmup_steps) % every == 0))

    def before_forward(self) -> None:
        """Put a due plan in force, if no gradient is alive (it would lose its slot)."""
        session = self._session
        if not self._due or self.recording or any(parameter.grad is not None for parameter in session.table.parameters):
            return
        self._due = False
        begin_s = time.perf_counter()
        if session.config.plan is not None or session.config.k != "auto":
            new = self._as_told()
        else:
            session.drain()
            self.profile = build_profile(session)
            new = self._solve(self.profile)
        self.solve_us = (time.perf_counter() - begin_s) * 1e6
        if new is not None:
            session.place(new)
            self.history.append(new)
            session.marks.clear()

    def _as_told(self) -> Plan | None:
        session = self._session
        if session.config.plan is not None:
            return None  # validated in forward order by the first placement
        k = min(int(session.config.k), len(session.units))
        return prefix_plan(self.units(), k, source="fixed k", reason=lambda unit: f"k={session.config.k} was given")

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
            )
        except PlanError:
            if self.plan.source == "first steps":
                raise
            return None
        if self.plan.source == "first steps" or new.k == self.plan.k:
            return new
        gain = 1 - new.predicted["step_us"] / max(1e-9, self.plan.predicted["step_us"])
        return new if gain >= _MIN_GAIN else None

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
