"""When a plan is made and put in force: before the first step from what memory allows, after the warm-up from measured times, and anew
where later measurements show that moving states pays (`cost_model/replan.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.capture.units import Unit
from hytrain_fx.config import Config
from hytrain_fx.cost_model.balance import streamed_share
from hytrain_fx.cost_model.budget import inputs_of
from hytrain_fx.cost_model.planner import GUARD, Stream, predict, streamed_k
from hytrain_fx.cost_model.planner import plan as solve
from hytrain_fx.cost_model.replan import Agenda, Verdict, judge, planning_guard, repays
from hytrain_fx.cost_model.simulate import Discipline
from hytrain_fx.errors import PlanError, UnsupportedError
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.planning.aside import Aside
from hytrain_fx.planning.balancing import Balancing
from hytrain_fx.planning.first_plan import FIRST_STEPS, fixed_plan, given_share, plan_until_measured, require_room
from hytrain_fx.planning.marks import StepMarks
from hytrain_fx.planning.model_units import ModelUnits, StateSizes
from hytrain_fx.planning.plan_check import Advice, PlanCheck
from hytrain_fx.planning.profiling import Measured, build_profile, cpu_steps_us
from hytrain_fx.planning.step_times import StepReader
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.memory import device_budget_bytes, host_budget_bytes, total_bytes
from hytrain_fx.runtime.probe import full_duplex_us_per_byte
from hytrain_fx.runtime.states.store import StateStore

# The first step compiles, the second is still cold: neither is measured.
_COLD_STEPS = 2
_AGAIN = "looked at again after"  # begins the note about the last decision
# In a row, in which the runtime works otherwise than the plan was solved for: then its share is solved anew. Twice as many the next time.
_OTHERWISE_STEPS = 8


class Planned(Protocol):
    """What planning reads and asks of the session whose plans it makes."""

    config: Config
    table: ParameterTable
    units: tuple[Unit, ...]
    engine: Engine
    states: StateStore
    marks: StepMarks
    steps_done: int
    step_us: deque[float]

    @property
    def unit_of_rows(self) -> Sequence[int]: ...
    @property
    def early_updates(self) -> bool: ...
    @property
    def awaits_factors(self) -> bool: ...
    def any_gradient_in_place(self) -> bool: ...

    def drain(self) -> None: ...
    def place(self, plan: Plan) -> None: ...
    def probe_device_update_us_per_param(self) -> float: ...


class Planning:
    """The plans of one session: which is in force, what it was made from, when the next is due."""

    def __init__(self, session: Planned) -> None:
        self._session = session
        self.units = ModelUnits(session.table, session.units, session.states)
        self._sizes = StateSizes(session.table.parameters, session.states)
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
        self._wanted: Plan | None = None  # due before the next forward
        self._check = PlanCheck()
        self._all_on_device: tuple[Profile, Plan | None] | None = None  # the plan for a profile
        self.captured_steps = 0  # with a captured backward, so far
        self.aside = Aside()
        self._guard = GUARD
        self._move_us_per_byte: float | None = None
        self._switch_us = 0.0  # how long the last change between CPU and STREAM held the steps up
        self._saw_streaming = False  # in the steps that the profile was made of
        self._measured_anew = False  # under the plan in force, since another share was last refused
        self._solved_for: Discipline | None = None  # how the runtime worked when the plan was last solved, share and all; None: that is due
        self._otherwise, self._otherwise_needed = 0, _OTHERWISE_STEPS

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.history[-1]

    @property
    def awaits_times(self) -> bool:
        """Whether the plan in force is the one of the first steps, before anything is measured."""
        return self.plan.source == FIRST_STEPS

    @property
    def steps_to_measure(self) -> int:
        """Steps before the first plan is solved: cold ones, then those that are measured."""
        return _COLD_STEPS + self._session.config.warmup_steps

    def first_placement(self) -> list[Placement]:
        """Where states rest until times are measured: as told, else on the host as far as it holds them.

        Raises UnsupportedError where states are to be streamed and the engine cannot.
        """
        session, units = self._session, self.units()
        if session.config.plan is not None:
            plan = session.config.plan
        elif session.config.k != "auto":
            plan = fixed_plan(session.config, units)
        else:
            require_room(session.config, units, self._sizes.device_bytes_per_param(), self._sizes.host_bytes_per_param(),
                         device_bytes=total_bytes(session.table.device), slots=not self._may_stream)
            plan = plan_until_measured(session.config, units, lambda unit: session.states.host_bytes(self.units.rows_of(unit)))
        if plan.numel(Placement.STREAM) and not session.engine.can_stream:
            asked = f"stream={session.config.stream!r}" if session.config.plan is None else "the given plan"
            raise UnsupportedError(f"{asked} streams states, and the {session.engine.name} engine cannot; expected engine=\"native\", or "
                                   "stream=0 and a plan without streamed shares")
        self.history.append(plan)
        return self.units.placement_of(plan)

    def after_step(self) -> None:
        """Decide whether the next forward begins with a new plan, and whether the step to come is measured for one. Raises nothing."""
        with self.aside("measuring a step"):
            self._after_step()

    def _after_step(self) -> None:
        session, done = self._session, self._session.steps_done
        self.captured_steps += session.marks.captured
        # The forward order is known now; a given k counts units in it, and it may differ from the order of registration.
        self._renumbered = done == 1 and session.config.plan is None and not self._solves
        if self.recording:  # what was measured before is lost, and measured again afterwards
            self._reader.forget()
            self._due = False
            return
        if self._reader.is_reading:
            self._reader.step_ended()
        elif not self._due and self.can_measure and self._agenda.begins(done, tuple(session.step_us)):
            self._reader.begin()
        if self._reader.steps >= session.config.warmup_steps and self._reader.is_reading and not self._due:
            self._reader.end()
            self._due = session.marks.steps > 0
            if not self._due:
                self._reader.forget()  # none of them ran captured graphs: others are read once steps do
        if self._balances and not self._reader.is_reading:
            self._balancing.saw(session.engine.finish_times())
            better = self._balancing.better(self.plan, self.units(), session.step_us[-1], done)
            self._wanted = None if better is None else self._if_it_repays(better)
            self._look_at_the_discipline()
        if self.profile is not None and self._solves and self._checks and not self._reader.is_reading and not self._due:
            self._check_the_plan(self.profile)

    @property
    def is_about_to_measure(self) -> bool:
        """Whether steps are being measured, or will be as soon as enough are done."""
        return self._reader.is_reading or self._due or self.can_measure or self._session.steps_done < self.steps_to_measure

    @property
    def can_measure(self) -> bool:
        """Whether the last step ran captured graphs, and those before were not all cold."""
        return self._session.marks.captured and self.captured_steps >= _COLD_STEPS

    def before_forward(self) -> None:
        """Put a due plan in force, if no gradient is alive (it would lose its slot). Raises nothing."""
        session = self._session
        if not (self._due or self._renumbered or self._wanted) or self.recording or session.any_gradient_in_place():
            return
        steps_us = list(session.step_us)[-session.config.warmup_steps :]
        was_due, plans = self._due, len(self.history)
        with self.aside("making a plan"):
            self._make_plan()
        if was_due and self.profile is not None:  # without one the next steps are measured
            self._agenda = self._agenda.after(session.steps_done, len(self.history) > plans, steps_us)
        self._due = self._renumbered = False
        self._wanted = None

    def _make_plan(self) -> None:
        if self._wanted is not None and not self._due:
            self._put_in_force(self._wanted)
            return
        begin_s = time.perf_counter()
        if self._due:
            self._measure()
            self.read_us = (time.perf_counter() - begin_s) * 1e6
            begin_s = time.perf_counter()
        new = self._next_plan()
        self.solve_us = (time.perf_counter() - begin_s) * 1e6
        if new is not None:
            self._put_in_force(new)
        else:
            self._check.restart()

    def _measure(self) -> None:
        """The profile of the steps just measured. The device runs on, with what it has been given, except before the first plan."""
        session = self._session
        if self.profile is None:
            session.drain()
        numels = [p.numel() for p in session.table.parameters]
        measured = Measured(self.units(), session.marks, self._reader.take(), session.unit_of_rows, numels, session.states.placement,
                            session.engine.workers, session.table.device)
        self._saw_streaming = streamed_share(self.plan) > 0.0
        self.profile = build_profile(measured, self, self.profile, streams=self._may_stream)
        self._guard = planning_guard(cpu_steps_us(measured))

    def _put_in_force(self, new: Plan) -> None:
        session, before = self._session, list(self._session.states.placement)
        begin_s = time.perf_counter()
        try:
            session.place(new)
        except Exception:
            with suppress(Exception):  # each row trains on from where it is; the plan in force is to say where that is
                session.place(self.plan)
            raise
        moved_us = (time.perf_counter() - begin_s) * 1e6
        moved = self._sizes.moved_bytes(before, session.states.placement)
        if moved:
            self._move_us_per_byte = moved_us / moved
        else:
            self._switch_us = moved_us
        self.history.append(new)
        session.marks.clear()
        self._balancing.restart(new)
        self._check.restart()
        self._wanted, self._measured_anew = None, False

    # ---- probes ----

    def device_update_us_per_param(self) -> float:
        """Microseconds per parameter of an update on the device, measured on a row made for it."""
        return self._session.probe_device_update_us_per_param()

    def stream_us_per_param(self) -> tuple[float, float]:
        """Microseconds per parameter of copying its states to the device and back, both directions busy."""
        to_device, to_host = full_duplex_us_per_byte(self._session.table.device)
        units = self.units()
        nbytes = sum(unit.stream_bytes for unit in units) / sum(unit.params for unit in units)
        return nbytes * to_device, nbytes * to_host

    @property
    def _solves(self) -> bool:
        return self._session.config.plan is None and self._session.config.k == "auto"

    @property
    def discipline(self) -> Discipline:
        """How this runtime orders and gates updates on this device, for predictions."""
        # On a GPU step() is reached early in the backward, though a norm is known at its end; a CPU has run the backward by then.
        awaits, early = self._session.awaits_factors, self._session.early_updates
        commits_early = self._session.table.device.type == "cuda" and not awaits
        return Discipline(barrier="before_forward" if self._session.marks.broken else "none",
                          commit_at="backward_start" if commits_early else "backward_end", early_updates=early,
                          early_weights=awaits, runs_ahead=commits_early and not early and self._balancing.runs_ahead)

    @property
    def _may_stream(self) -> bool:
        """Whether times for streaming are of use: on a CPU nothing is streamed that was not asked for."""
        session = self._session
        wanted = session.table.device.type == "cuda" if session.config.stream == "auto" else given_share(session.config) > 0
        given = session.config.plan is not None and session.config.plan.numel(Placement.STREAM) > 0
        return session.engine.can_stream and (wanted or given)

    @property
    def _balances(self) -> bool:
        """Whether the streamed share follows what running steps show."""
        return self._solves and self._session.config.stream == "auto" and 0.0 < streamed_share(self.plan) < 1.0

    def _look_at_the_discipline(self) -> None:
        """Updates may come to begin otherwise than the share was solved for (guesses at clipping's factor are given up, say): balancing
        would follow in small moves, each of which holds a step up.
        """
        self._otherwise = self._otherwise + 1 if self.discipline != self._solved_for else 0
        if self._otherwise >= self._otherwise_needed and self._agenda.every:
            self._otherwise, self._otherwise_needed, self._solved_for = 0, 2 * self._otherwise_needed, None
            self._agenda = self._agenda.soon(self._session.steps_done)

    def _with_prediction(self, plan: Plan) -> Plan:
        return plan if self.profile is None else replace(plan, predicted=self._predict(self.profile, plan))

    def _next_plan(self) -> Plan | None:
        """The plan to put in force now, None where the present one stays."""
        config, units = self._session.config, self.units()
        if self._solves:
            assert self.profile is not None
            return self._solve(self.profile)
        if self.profile is None:
            return fixed_plan(config, units)
        if config.plan is not None:
            return replace(self.plan, predicted=self._predict(self.profile, self.plan))
        return solve(self.profile, k=int(config.k), stream=given_share(config), discipline=self.discipline,
                     **self._bytes_per_param())

    def _solve(self, profile: Profile) -> Plan | None:
        """A plan solved from the profile, if it is the first, or worth moving states for."""
        config = self._session.config
        stream: Stream = config.stream if config.stream == "auto" else given_share(config)
        within = self._within(profile)
        try:
            if self._balances and self._solved_for is not None and streamed_k(profile, **within) == self.plan.k:
                self._stay(profile, f"k={self.plan.k} is still solved")
                return None
            self._solved_for = within["discipline"]
            new = solve(profile, rule=config.planner, stream=stream if self._may_stream else 0.0, **within)
        except PlanError:
            if self.awaits_times:
                raise
            return None  # the plan in force stays: memory has become too short to move to another
        return new if self.awaits_times else self._if_worth_it(profile, new)

    def _within(self, profile: Profile) -> dict[str, Any]:
        """What a plan is solved within: memory, and how the runtime works."""
        session, config = self._session, self._session.config
        all_states = profile.params * self._sizes.device_bytes_per_param()
        budget = device_budget_bytes(config.gpu_states, session.table.device, all_states, self._sizes.resident_device_bytes())
        return {
            "budget_bytes": max(int(budget) - (self._sizes.wider_bytes() if self._may_stream else 0), 0),
            "budget_counts_streamed": config.gpu_states == "auto",
            "host_budget_bytes": self._host_budget_bytes(),
            "guard": self._guard,
            "discipline": self.discipline,
            **self._bytes_per_param(),
        }

    @property
    def _checks(self) -> bool:
        """Whether plans are held against all states on the device. Not where the device is the CPU: its steps are too uneven for that."""
        return self._session.table.device.type == "cuda" and self._agenda.every > 0

    def _check_the_plan(self, profile: Profile) -> None:
        """See whether the plan in force keeps what was promised (`planning/plan_check.py`)."""
        if self._all_on_device is None or self._all_on_device[0] is not profile:
            self._all_on_device = (profile, self._solved_for_all(profile))
        of_all = self._all_on_device[1]
        all_us = None if of_all is None or of_all.rows == self.plan.rows else of_all.predicted["step_us"]
        advice = self._check.saw(self._session.step_us[-1], self.plan, all_us)
        if advice is Advice.MEASURE:
            self._agenda = self._agenda.soon(self._session.steps_done)
            self._solved_for = None
        elif advice is Advice.TRY:
            assert of_all is not None
            self._wanted = replace(of_all, notes=(*of_all.notes, self._check.note))
        elif advice is Advice.BACK:
            assert self._check.before is not None
            self._wanted = replace(self._check.before, notes=(*self._check.before.notes, self._check.note))
        if self._check.note and self._check.note not in self.plan.notes:
            self.history[-1] = replace(self.plan, notes=(*self.plan.notes, self._check.note))

    def _solved_for_all(self, profile: Profile) -> Plan | None:
        """All states on the device, None where they do not fit."""
        made = solve(profile, k=len(profile.units), **self._within(profile))
        return made if made.k == len(profile.units) else None

    def _if_worth_it(self, profile: Profile, new: Plan) -> Plan | None:
        """The new plan, None where the one in force stays; what is predicted for that one is renewed."""
        session = self._session
        present = replace(self.plan, predicted=self._predict(profile, self.plan))
        wanted = self.units.placement_of(new)
        migration_us = self._sizes.moved_bytes(session.states.placement, wanted) * self._us_per_moved_byte(profile)
        steps_us = list(session.step_us)[-session.config.warmup_steps :]
        self.verdict = judge(self._check.expected_us(present), self._check.expected_us(new), steps_us, migration_us)
        if self.verdict.moves and wanted != session.states.placement:
            return replace(new, notes=(*new.notes, f"{_AGAIN} {session.steps_done} steps: {self.verdict}"))
        self._stay(profile, str(self.verdict), present.predicted)
        return None

    def _if_it_repays(self, better: Plan) -> Plan | None:
        """A plan with another streamed share, with its prediction; None where a profile of such steps predicts too little of it.

        Updates may end apart because gradients come when they do, and then no share changes that. Or the profile is of steps that were
        disturbed: so it is measured anew before a refusal counts.
        """
        better = self._with_prediction(better)
        if self.profile is not None and self._saw_streaming:
            present_us = self._predict(self.profile, self.plan)["step_us"]
            if not repays(present_us, better.predicted["step_us"], self._switch_us):
                if self._agenda.every and not self._measured_anew:
                    self._agenda = self._agenda.soon(self._session.steps_done)
                    self._measured_anew = True
                else:
                    self._balancing.refused()
                    self._measured_anew = False
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
        return predict(profile, plan, discipline=self.discipline, **self._bytes_per_param())

    def _bytes_per_param(self) -> dict[str, Any]:
        sizes = self._sizes
        return {"state_bytes_per_param": sizes.device_bytes_per_param(), "host_state_bytes_per_param": sizes.host_bytes_per_param()}

    def _host_budget_bytes(self) -> int:
        """What states may take on the host in all: as told, else what they take already and most of what is available."""
        limit = self._session.config.host_memory
        return host_budget_bytes(limit) + (self._sizes.resident_host_bytes() if limit is None else 0)

    def _us_per_moved_byte(self, profile: Profile) -> float:
        """As the last move took, else as gradients travel."""
        if self._move_us_per_byte is not None:
            return self._move_us_per_byte
        return (profile.d2h_us + profile.h2d_us) / sum(2 * unit.grad_bytes for unit in profile.units)
