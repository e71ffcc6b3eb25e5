"""When a plan is made and put in force: before the first step from what memory allows, after the warm-up from measured times, and anew
where later measurements show that moving states pays (`cost_model/replan.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hytrain_fx.balancing import Balancing
from hytrain_fx.cost_model.balance import streamed_share
from hytrain_fx.cost_model.inputs import inputs_of
from hytrain_fx.cost_model.planner import GUARD, Stream, predict, prefix_plan, streamed_k
from hytrain_fx.cost_model.planner import plan as solve
from hytrain_fx.cost_model.reasons import given_share_reason
from hytrain_fx.cost_model.replan import Agenda, Verdict, judge, planning_guard, repays
from hytrain_fx.cost_model.simulate import Discipline
from hytrain_fx.errors import PlanError, UnsupportedError
from hytrain_fx.ir.plan import Placement, Plan, validate
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import TaskGraph, Unit, build_task_graph, streamed_state_bytes
from hytrain_fx.profiling import Measured, build_profile, cpu_steps_us
from hytrain_fx.runtime.memory import device_budget_bytes, host_budget_bytes
from hytrain_fx.runtime.probe import full_duplex_us_per_byte
from hytrain_fx.step_times import StepReader

if TYPE_CHECKING:
    from hytrain_fx.session import Session

# The first step compiles, the second is still cold: neither is measured.
_COLD_STEPS = 2
_AGAIN = "looked at again after"  # begins the note about the last decision
_FIRST = "first steps"  # the source of the plan that is in force until times are measured


class Planning:
    """The plans of one session: which is in force, what it was made from, when the next is due."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.profile: Profile | None = None
        self.history: list[Plan] = []
        self.verdict: Verdict | None = None  # why states moved or stayed when the plan was last solved anew
        self.read_us = self.solve_us = 0.0  # how long the launching thread was held up to read the last times, and to make the last plan
        self.recording = False  # inside hytrain_fx.record(): the engine's records are the user's, so no plan is made from them
        config = session.config
        self._agenda = Agenda(config.replan_every if self._solves else 0, config.warmup_steps, self.steps_to_measure)
        self._reader = StepReader(session.engine, session.marks)
        self._due = self._renumbered = False
        self._balancing = Balancing()
        self._balanced: Plan | None = None  # due before the next forward
        self._guard = GUARD
        self._move_us_per_byte: float | None = None
        self._switch_us = 0.0  # how long the last change between CPU and STREAM held the steps up
        self._saw_streaming = False  # in the steps that the profile was made of

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
        """Where states rest until times are measured: as told, else on the host as far as it holds them.

        Raises UnsupportedError where states are to be streamed and the engine cannot.
        """
        session, units = self._session, self.units()
        if session.config.plan is not None:
            plan = session.config.plan
        elif session.config.k != "auto":
            plan = self._fixed(units)
        else:
            plan = self._until_measured(units)
        if plan.numel(Placement.STREAM) and not session.engine.can_stream:
            asked = f"stream={session.config.stream!r}" if session.config.plan is None else "the given plan"
            raise UnsupportedError(f"{asked} streams states, and the {session.engine.name} engine cannot; expected engine=\"native\", or "
                                   "stream=0 and a plan without streamed shares")
        self.history.append(plan)
        return self.placement_of(plan)

    def _fixed(self, units: Sequence[Unit]) -> Plan:
        k = int(self._session.config.k)
        return prefix_plan(units, min(k, len(units)), source="fixed k", reason=lambda unit: f"k={k} was given", share=self._given_share,
                           streamed_reason=lambda unit: given_share_reason(unit, k))

    def _until_measured(self, units: Sequence[Unit]) -> Plan:
        session = self._session
        limit = host_budget_bytes(session.config.host_memory)
        left = [session.states.host_bytes(self._rows_of(unit)) for unit in units]
        k = 0
        while k < len(units) and sum(left[k:]) > limit:
            k += 1
        fits = f"the host's {limit / 2**30:.1f} GiB hold the states of the last {len(units) - k} units"
        why = "times are not measured yet" if k == 0 else fits
        return prefix_plan(units, k, source=_FIRST, reason=lambda unit: why, share=self._given_share,
                           streamed_reason=lambda unit: given_share_reason(unit, k))

    @property
    def _given_share(self) -> float:
        return 0.0 if self._session.config.stream == "auto" else float(self._session.config.stream)

    def placement_of(self, plan: Plan) -> list[Placement]:
        """Placement by row: of the share that holds the row's first element (shares of our own plans end between rows)."""
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
        session, done = self._session, self._session.steps_done
        # The forward order is known now; a given k counts units in it, and it may differ from the order of registration.
        self._renumbered = done == 1 and session.config.plan is None and not self._solves
        if self.recording:  # what was measured before is lost, and measured again afterwards
            self._reader.forget()
            self._due = False
            return
        if self._reader.is_reading:
            self._reader.step_ended()
        elif not self._due and done >= _COLD_STEPS and self._agenda.begins(done, tuple(session.step_us)):
            self._reader.begin()
        if self._reader.steps >= session.config.warmup_steps and self._reader.is_reading and not self._due:
            self._reader.end()
            self._due = True
        if self._balances and not self._reader.is_reading:
            self._balancing.saw(session.engine.finish_times())
            better = self._balancing.better(self.plan, self.units(), session.step_us[-1], done)
            self._balanced = None if better is None else self._if_it_repays(better)

    def before_forward(self) -> None:
        """Put a due plan in force, if no gradient is alive (it would lose its slot)."""
        session = self._session
        if not (self._due or self._renumbered or self._balanced) or self.recording or session.nodes.gradients.any_in_place():
            return
        if self._balanced is not None and not self._due:
            self._put_in_force(self._balanced)
            return
        begin_s = time.perf_counter()
        if self._due:
            self._measure()
            self.read_us = (time.perf_counter() - begin_s) * 1e6
            begin_s = time.perf_counter()
        new = self._next_plan()
        steps_us = list(session.step_us)[-session.config.warmup_steps :]
        self.solve_us = (time.perf_counter() - begin_s) * 1e6
        if new is not None:
            self._put_in_force(new)
        if self._due:
            self._agenda = self._agenda.after(session.steps_done, new is not None, steps_us)
        self._due = self._renumbered = False

    def _measure(self) -> None:
        """The profile of the steps just measured. The device runs on, with what it has been given, except before the first plan."""
        session = self._session
        if self.profile is None:
            session.drain()
        numels = [p.numel() for p in session.table.parameters]
        measured = Measured(self.units(), session.marks, self._reader.take(), session.nodes.unit_of, numels, session.states.placement,
                            session.engine.workers, session.table.device)
        self._saw_streaming = streamed_share(self.plan) > 0.0
        self.profile = build_profile(measured, self, self.profile, streams=self._may_stream)
        self._guard = planning_guard(cpu_steps_us(measured))

    def _put_in_force(self, new: Plan) -> None:
        session, before = self._session, list(self._session.states.placement)
        begin_s = time.perf_counter()
        session.place(new)
        moved_us = (time.perf_counter() - begin_s) * 1e6
        moved = self._moved_bytes(before, session.states.placement)
        if moved:
            self._move_us_per_byte = moved_us / moved
        else:
            self._switch_us = moved_us
        self.history.append(new)
        session.marks.clear()
        self._balancing.restart(new)
        self._balanced = None

    # ---- probes ----

    def device_update_us_per_param(self) -> float:
        """Microseconds per parameter of an update on the device, measured on a row made for it."""
        return self._session.probe_device_update_us_per_param()

    def stream_us_per_param(self) -> tuple[float, float]:
        """Microseconds per parameter of copying its states to the device and back, both directions busy."""
        to_device, to_host = full_duplex_us_per_byte(self._session.table.device)
        units = self.units()
        nbytes = sum(streamed_state_bytes(unit.params, unit.grad_bytes) for unit in units) / sum(unit.params for unit in units)
        return nbytes * to_device, nbytes * to_host

    @property
    def _solves(self) -> bool:
        return self._session.config.plan is None and self._session.config.k == "auto"

    @property
    def discipline(self) -> Discipline:
        """How this runtime orders and gates updates on this device, for predictions."""
        # On a GPU step() is reached early in the backward, though a norm is known at its end; a CPU has run the backward by then.
        foresight, early = self._session.foresight, self._session.foresight.will_go_ahead
        commits_early = self._session.table.device.type == "cuda" and not foresight.awaits_factors
        return Discipline(commit_at="backward_start" if commits_early else "backward_end", early_updates=early,
                          early_weights=foresight.awaits_factors, runs_ahead=commits_early and not early and self._balancing.runs_ahead)

    @property
    def _may_stream(self) -> bool:
        """Whether times for streaming are of use: on a CPU nothing is streamed that was not asked for."""
        session = self._session
        wanted = session.table.device.type == "cuda" if session.config.stream == "auto" else self._given_share > 0
        given = session.config.plan is not None and session.config.plan.numel(Placement.STREAM) > 0
        return session.engine.can_stream and (wanted or given)

    @property
    def _balances(self) -> bool:
        """Whether the streamed share follows what running steps show."""
        return self._solves and self._session.config.stream == "auto" and 0.0 < streamed_share(self.plan) < 1.0

    def _with_prediction(self, plan: Plan) -> Plan:
        return plan if self.profile is None else replace(plan, predicted=self._predict(self.profile, plan))

    def _next_plan(self) -> Plan | None:
        """The plan to put in force now, None where the present one stays."""
        config, units = self._session.config, self.units()
        if self._solves:
            assert self.profile is not None
            return self._solve(self.profile)
        if self.profile is None:
            return self._fixed(units)
        if config.plan is not None:
            return replace(self.plan, predicted=self._predict(self.profile, self.plan))
        return solve(self.profile, k=min(int(config.k), len(units)), stream=self._given_share, **self._sizes(), discipline=self.discipline)

    def _solve(self, profile: Profile) -> Plan | None:
        """A plan solved from the profile, if it is the first, or worth moving states for."""
        session, config = self._session, self._session.config
        all_states = profile.params * self._device_bytes_per_param()
        budget = device_budget_bytes(config.gpu_states, session.table.device, all_states, self._resident_bytes())
        stream: Stream = config.stream if config.stream == "auto" else self._given_share
        within: dict[str, Any] = {
            "budget_bytes": max(int(budget) - (self._wider_bytes() if self._may_stream else 0), 0),
            "budget_counts_streamed": config.gpu_states == "auto",
            "host_budget_bytes": self._resident_host_bytes() + host_budget_bytes(config.host_memory),
            "guard": self._guard,
            "discipline": self.discipline,
            **self._sizes(),
        }
        try:
            if self._balances and streamed_k(profile, **within) == self.plan.k:
                self._stay(profile, f"k={self.plan.k} is still solved")
                return None
            new = solve(profile, rule=config.planner, stream=stream if self._may_stream else 0.0, **within)
        except PlanError:
            if self.plan.source == _FIRST:
                raise
            return None  # the plan in force stays: memory has become too short to move to another
        return new if self.plan.source == _FIRST else self._if_worth_it(profile, new)

    def _if_worth_it(self, profile: Profile, new: Plan) -> Plan | None:
        """The new plan, None where the one in force stays; what is predicted for that one is renewed."""
        session = self._session
        predicted = self._predict(profile, self.plan)
        wanted = self.placement_of(new)
        migration_us = self._moved_bytes(session.states.placement, wanted) * self._us_per_moved_byte(profile)
        steps_us = list(session.step_us)[-session.config.warmup_steps :]
        self.verdict = judge(predicted["step_us"], new.predicted["step_us"], steps_us, migration_us)
        if self.verdict.moves and wanted != session.states.placement:
            return replace(new, notes=(*new.notes, f"{_AGAIN} {session.steps_done} steps: {self.verdict}"))
        self._stay(profile, str(self.verdict), predicted)
        return None

    def _if_it_repays(self, better: Plan) -> Plan | None:
        """A plan with another streamed share, with its prediction; None where a profile of such steps predicts too little of it.

        Updates may end apart because gradients come when they do, and then no share changes that.
        """
        better = self._with_prediction(better)
        if self.profile is not None and self._saw_streaming:
            present_us = self._predict(self.profile, self.plan)["step_us"]
            if not repays(present_us, better.predicted["step_us"], self._switch_us):
                self._balancing.refused()
                return None
        return better

    def _stay(self, profile: Profile, why: str, predicted: dict[str, float] | None = None) -> None:
        """The plan in force stays; what is told of it is of `profile`."""
        present = self.plan
        inputs = inputs_of(profile, self._guard) | {"stream_share": present.inputs.get("stream_share", 0.0)}
        notes = (*(note for note in present.notes if not note.startswith(_AGAIN)), f"{_AGAIN} {self._session.steps_done} steps: {why}")
        if predicted is None:
            predicted = self._predict(profile, present)
        self.history[-1] = replace(present, predicted=predicted, inputs=present.inputs | inputs, notes=notes)

    def _predict(self, profile: Profile, plan: Plan) -> dict[str, float]:
        return predict(profile, plan, self._device_bytes_per_param(), self.discipline, self._host_bytes_per_param())

    def _sizes(self) -> dict[str, Any]:
        return {"state_bytes_per_param": self._device_bytes_per_param(), "host_state_bytes_per_param": self._host_bytes_per_param()}

    def _moved_bytes(self, before: Sequence[Placement], after: Sequence[Placement]) -> int:
        """Bytes of states that change sides; between CPU and STREAM they stay where they are."""
        rows = [row for row, (b, a) in enumerate(zip(before, after, strict=True)) if (b is Placement.GPU) != (a is Placement.GPU)]
        return self._session.states.host_bytes(rows, Placement.STREAM)

    def _us_per_moved_byte(self, profile: Profile) -> float:
        """As the last move took, else as gradients travel."""
        if self._move_us_per_byte is not None:
            return self._move_us_per_byte
        return (profile.d2h_us + profile.h2d_us) / sum(2 * unit.grad_bytes for unit in profile.units)

    def _resident_bytes(self) -> int:
        """Device memory that states, and gradients that stay there until their update, take already."""
        states, parameters = self._session.states, self._session.table.parameters
        of = {place: [row for row, at in enumerate(states.placement) if at is place] for place in Placement}
        kept = (parameters[row] for row in (*of[Placement.GPU], *of[Placement.STREAM]))
        return states.device_bytes(of[Placement.GPU]) + sum(p.numel() * p.element_size() for p in kept)

    def _resident_host_bytes(self) -> int:
        session = self._session
        if session.config.host_memory is not None:
            return 0
        placement = session.states.placement
        return sum(session.states.host_bytes([row for row, at in enumerate(placement) if at is place], place)
                   for place in (Placement.CPU, Placement.STREAM))

    def _host_bytes_per_param(self) -> float:
        """States on the host without slots, but for what slots have that gradients do not fill."""
        session = self._session
        states_bytes = session.states.host_bytes(range(len(session.table)), Placement.STREAM) + self._wider_bytes()
        return states_bytes / sum(p.numel() for p in session.table.parameters)

    def _device_bytes_per_param(self) -> float:
        """States, and the gradient that stays on the device until its update has run."""
        session = self._session
        rows = range(len(session.table))
        grads = sum(p.numel() * p.element_size() for p in session.table.parameters)
        return (session.states.device_bytes(rows) + grads) / sum(p.numel() for p in session.table.parameters)

    def _wider_bytes(self) -> int:
        """By how much gradients of rows with 16-bit copies are larger in a slot or on the device than on their way."""
        parameters = self._session.table.parameters
        return sum(p.numel() * p.element_size() - self._session.states.travelling_bytes(row) for row, p in enumerate(parameters))

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
            param_numels=tuple(p.numel() for p in parameters),
            grad_bytes=sum(map(session.states.travelling_bytes, unit.rows)),
            forward_flops=flops["forward"],
            backward_flops=flops["backward"],
        )
