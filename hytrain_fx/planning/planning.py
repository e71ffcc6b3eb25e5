"""The plans of one session: which one is in force, what it was made from, and when another is due.

    after_step           what a step has shown goes to the controller; what that decides is done, or
                         is due before a forward
    making_a_plan        around what the session does where a plan is due and no gradient is left:
        next_plan        the plan to put in force, None where the present one stays
        putting_in_force     around the moving of states
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.capture.units import Unit
from hytrain_fx.config import Config
from hytrain_fx.cost_model.balance import streamed_share
from hytrain_fx.cost_model.budget import inputs_of
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import GUARD
from hytrain_fx.cost_model.replan import Verdict, judge, planning_guard, repays
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.plan import PlacedPiece, Plan, renumbered
from hytrain_fx.ir.profile import Profile
from hytrain_fx.planning.agreed_trials import Agreed, AgreedTrials, Told, to_tell
from hytrain_fx.planning.aside import Aside, Delay
from hytrain_fx.planning.balancing import Balancing
from hytrain_fx.planning.controller import Action, Controller, Decision, Event, State
from hytrain_fx.planning.first_plan import FIRST_STEPS, first_plan
from hytrain_fx.planning.marks import StepMarks
from hytrain_fx.planning.model_units import ModelUnits, StateSizes
from hytrain_fx.planning.profiling import Measured, Probes, StepReader, build_profile, cpu_steps_us, stream_us_per_param
from hytrain_fx.planning.solving import MoveCosts, Solver, expected_us
from hytrain_fx.planning.stream_trial import StreamTrial
from hytrain_fx.planning.watches import FinishedStep, StepReport
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.memory import total_bytes
from hytrain_fx.runtime.ranks import Ranks
from hytrain_fx.runtime.states.store import StateStore

# The first step compiles, the second is still cold: neither is measured.
_COLD_STEPS = 2
_AGAIN = "looked at again after"  # begins the note about the last decision
# What stays noted about the plan for good, next to the last decision.
_NOTED = (Event.DOUBTED, Event.DOUBT_CONFIRMED, Event.PAID, Event.VAIN)


@dataclass(frozen=True, slots=True)
class _Due:
    """What is to be done before the next forward.

    Put `plan` in force; None: solve one.
    """

    event: Event
    plan: Plan | None = None


class Planning:
    """Makes the plans; the session that owns it puts them in force.

    last, verdict       what the session told of the last step; why states moved or stayed lately
    read_us, solve_us   how long reading the last times, and making the last plan, held up the loop
    recording, held     no plan is made from what steps show: inside hytrain_fx.record(); up to the
                        step of this number, as the CPU trains a share that plans do not know of
    captured_steps      steps with a captured backward, so far
    may_copy            whether fp32 weights may get 16-bit copies, under autocast
    """

    def __init__(
        self, config: Config, table: ParameterTable, registered: Sequence[Unit], states: StateStore, engine: Engine, marks: StepMarks,
        ranks: Ranks | None
    ) -> None:
        self._config, self._table, self._states, self._engine, self._marks = config, table, states, engine, marks
        self.units = ModelUnits(table, registered, states, ranks)
        # Ranks average gradients in fp32.
        self.may_copy = config.autocast_copies and states.may_halve and not ranks
        self._sizes = StateSizes(table, states, may_copy=self.may_copy and engine.takes_copies)
        self._moves = MoveCosts(self._sizes, states)
        self.solver = Solver(config, table.device, self.units, self._sizes, can_stream=engine.can_stream)
        self.controller = Controller(config.replan_every if self.solver.solves else 0, config.warmup_steps)
        self.aside = Aside()
        self.history: list[Plan] = []
        self.profile: Profile | None = None
        self.verdict: Verdict | None = None
        self.read_us = self.solve_us = 0.0
        self.recording, self.held, self.captured_steps = False, 0, 0
        self._reader = StepReader(engine, marks, self.units.time_lanes)
        self._balancing, self._stream_trial, self._looks = Balancing(), StreamTrial(), Delay()
        self._agreed_trials = AgreedTrials(ranks.tell_number) if ranks else None
        self.last = FinishedStep()
        self._due: _Due | None = None
        self.guard = GUARD
        self._saw_streaming = False  # in the steps that the profile was made from
        self._before_trial: Plan | None = None

    # ---- what the session asks ----

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
        return _COLD_STEPS + self._config.warmup_steps

    @property
    def is_about_to_measure(self) -> bool:
        """Whether steps are being measured, or will be once enough are done."""
        waits = self._reader.is_reading or self._due is not None or self._can_measure
        return waits or self.last.steps_done < self.steps_to_measure

    @property
    def is_due(self) -> bool:
        """Whether a plan is to be made before the next forward, if no gradient is alive.

        A gradient would lose its slot.
        """
        return self._due is not None and not self.recording

    @property
    def discipline(self) -> Discipline:
        """How this runtime orders and gates updates on this device, for predictions."""
        on_gpu = self._table.device.type == "cuda"
        return self.last.discipline(on_gpu=on_gpu, broken=self._marks.broken, runs_ahead=self._balancing.runs_ahead,
                                     units_ahead=self.units.ahead)

    def first_placement(self) -> tuple[PlacedPiece, ...]:
        """Where states rest until times are measured. Raises as `first_plan` does."""
        self.history.append(first_plan(self._config, self.units, self._sizes, self._engine,
                                       device_bytes=total_bytes(self._table.device), streams=self.solver.may_stream))
        return self.units.pieces_of(self.plan)

    def renumber(self) -> None:
        """Have all plans count units in the order that forwards have shown by now."""
        units = self.units()
        self.history = [renumbered(plan, units) for plan in self.history]
        if self._due is not None and self._due.plan is not None:
            self._due = replace(self._due, plan=renumbered(self._due.plan, units))

    # ---- after a step ----

    def after_step(self, step: FinishedStep) -> None:
        """Measure the step, and do what the controller decides. Raises RankError alone."""
        self.last = step
        agreed = self._agreed_trials.at(step.steps_done, lambda: to_tell(
            self.controller.told, self.plan if self.solver.solves else None, away=self.recording or self._due is not None,
            untried=self._stream_trial.untried is not None and self.controller.may_try)) if self._agreed_trials else None
        with self.aside("measuring a step"):
            try:
                self._after_step(agreed)
            except Exception as error:
                if self._due is None:  # else the next forward decides
                    self.do(self.controller.hear(Event.FAILED, f"measuring a step failed ({type(error).__name__})"))
                raise

    def _after_step(self, agreed: Agreed | None) -> None:
        self.captured_steps += self._marks.captured
        if self.recording or self.last.steps_done <= self.held:
            self.stop_measuring(recording=self.recording)
            return
        if self._reader.is_reading:
            self._reader.step_ended()
        if self._stream_trial.untried and agreed and agreed.begins is Told.WANTS_STREAMED:
            self._begin_streaming()
        elif self._due is None:
            self.do(self.controller.saw(self._report(agreed)))

    def stop_measuring(self, *, recording: bool) -> None:
        """What was measured is lost, and nothing is measured in a recording of the caller's."""
        self.recording = recording
        self.do(self.controller.hear(Event.LOST, "steps were recorded or shared meanwhile"))

    @property
    def _can_measure(self) -> bool:
        """Whether the last step ran captured graphs, and those before were not all cold."""
        return self._marks.captured and self.captured_steps >= _COLD_STEPS

    def _report(self, agreed: Agreed | None) -> StepReport:
        done, reading = self.last.steps_done, self._reader.is_reading
        complete = reading and self._reader.steps >= self._config.warmup_steps
        if complete:
            self._reader.end()
        follows = self._follows_ends and not reading
        if follows:
            self._balancing.saw(self._engine.finish_times())
        return StepReport(
            steps_done=done,
            steps_us=self.last.steps_us,
            discipline=self.discipline,
            can_measure=self._can_measure,
            complete=complete,
            lost=self._marks.steps == 0,
            order_known=done == 1 and self._config.plan is None and not self.solver.solves,
            follows_ends=follows,
            ends_seen=self._balancing.fresh, may_look=self._looks.is_little,
            predicted_us=self.plan.predicted.get("step_us"),
            all_on_device_us=self.solver.on_device_us(None if reading else self.profile, self.guard, self.discipline, self.plan),
            agreed=agreed,
        )

    @property
    def _follows_ends(self) -> bool:
        """Whether the streamed share follows what running steps show."""
        is_open = self.controller.state is not State.FIXED and not self._stream_trial.kept
        return is_open and self.solver.solves_share and 0.0 < streamed_share(self.plan) < 1.0

    def do(self, decision: Decision) -> None:
        """What the controller has decided."""
        match decision.action:
            case Action.BEGIN:
                self._reader.begin()
            case Action.FORGET:
                self._reader.forget()
                self._due = None
            case Action.SOLVE:
                self._due = _Due(Event.MOVED)
            case Action.RENEW:
                self._due = _Due(Event.PLACED, self.solver.given(None, self.plan, self.discipline))
            case Action.BALANCE:
                with self._looks():
                    self._balance()
            case Action.TRY:
                self._before_trial, of = self.plan, self.profile
                self.want(None if of is None else self.solver.all_on_device(of, self.guard, self.discipline), decision.why)
            case Action.BACK:
                self.want(self._before_trial, decision.why)
        if decision.event in (Event.PAID, Event.VAIN, Event.SHORT):
            self._stream_trial.ended(paid=decision.event is Event.PAID)
        if decision.event in _NOTED and decision.why not in self.plan.notes:
            self.history[-1] = replace(self.plan, notes=(*self.plan.notes, decision.why))

    def want(self, plan: Plan | None, why: str) -> None:
        """In force before the next forward that finds no gradient in place; None fits no more."""
        if plan is None:
            return self.do(self.controller.hear(Event.SHORT))
        self._due = _Due(Event.PLACED, replace(plan, notes=(*plan.notes, why)))

    def _balance(self) -> None:
        """Look for a streamed share that ends updates together and repays, by the profile.

        Updates may end apart because gradients come when they do, and then no share changes that.
        """
        better = self._balancing.better(self.plan, self.units(), self.last.steps_us[-1], self.last.steps_done)
        if better is None:
            self.controller.hear(Event.TOGETHER)
            self._try_streaming()
            return
        if not self.solver.has_room(better, self.plan, self.discipline):
            self.controller.hear(Event.REFUSED, f"not moved, as memory has no room for it: {better.notes[-1]}")
            return
        if self.profile is not None:
            better = self.solver.predicted(self.profile, better, self.discipline)
            if self._saw_streaming and not self._balancing.lane_is_late:
                present_us = self.solver.predict(self.profile, self.plan, self.discipline)["step_us"]
                better_us = better.predicted["step_us"]
                if not repays(present_us, better_us, self._moves.switch_us):
                    why = f"{better.notes[-1]}: predicted {time_text(better_us)} a step instead of {time_text(present_us)}"
                    self.controller.hear(Event.CONTRADICTED, f"not moved: {why}")
                    return
        if self.controller.hear(Event.APART, better.notes[-1]).action is Action.PLACE:
            self._due = _Due(Event.PLACED, better)

    def _try_streaming(self) -> None:
        if self._table.device.type != "cuda" or self.last.tries or not self.controller.may_try:  # a CPU's steps are too uneven
            return
        self._stream_trial.look(self.plan, self.units(), self.last.steps_us, self.discipline, self.solver.predict,
                                lambda plan: self.solver.has_room(plan, self.plan, self.discipline))
        if not self._agreed_trials:
            self._begin_streaming()

    def _begin_streaming(self) -> None:
        found = self._stream_trial.untried
        if found and not self._due and self.controller.hear(Event.UNTRIED, found.notes[-1]).action is Action.PLACE:
            self._stream_trial.begun()
            self._before_trial, self._due = self.plan, _Due(Event.PLACED, found)

    # ---- before a forward ----

    @contextmanager
    def making_a_plan(self) -> Iterator[None]:
        """Use it around what puts a due plan in force.

        An error in it leaves the plan in force, and does not reach the loop.
        """
        with self.aside("making a plan"):
            try:
                yield
            except BaseException as error:
                solves, unmeasured = self._due is not None and self._due.plan is None, self.profile is None
                failed = Event.UNMEASURED if solves and unmeasured else Event.FAILED
                self.do(self.controller.hear(failed, f"making a plan failed ({type(error).__name__})"))
                raise
            finally:
                self._due = None

    def next_plan(self, device_update_us_per_param: Callable[[], float]) -> Plan | None:
        """The plan to put in force, None where the present one stays.

        Meanwhile the device works on what it has been given.

        device_update_us_per_param    times an update on the device, where no unit has run one
        """
        if self._due is None or self._due.plan is not None:
            return None if self._due is None else self._due.plan
        with self._looks():
            begin_s = time.perf_counter()
            profile = self.profile = self._measured(device_update_us_per_param)
            read_s = time.perf_counter()
            new = self._solve(profile) if self.solver.solves else self.solver.given(profile, self.plan, self.discipline)
        self.read_us, self.solve_us = (read_s - begin_s) * 1e6, (time.perf_counter() - read_s) * 1e6
        return new

    def _measured(self, device_update_us_per_param: Callable[[], float]) -> Profile:
        """The profile of the steps just measured."""
        units, device = self.units.fixed(), self._table.device
        numels = {row: max(self._states.pieces.piece(row).numel, 1) for row in self._states.placement}
        measured = Measured(units, self._marks, self._reader.take(), self.units.of_rows(), numels, self._states.placement,
                            self._engine.workers, device, is_stage=self._config.pipeline is not None)
        self._saw_streaming = streamed_share(self.plan) > 0.0
        probes = Probes(device_update_us_per_param, partial(stream_us_per_param, units, device))
        profile = self.units.with_lane_times(build_profile(measured, probes, self.profile, streams=self.solver.may_stream))
        self.guard = planning_guard(cpu_steps_us(measured))
        self._stream_trial.measured(profile, streaming=self._saw_streaming)
        return profile

    def _solve(self, profile: Profile) -> Plan | None:
        """A plan solved from the profile, if it is the first, or worth moving states for."""
        discipline = self.discipline
        try:
            share_stays = (self._follows_ends or self._stream_trial.kept) and self.controller.solved_for is not None
            if share_stays and self.solver.keeps_k(profile, self.guard, discipline, self.plan.k):
                self._stay(profile, self.solver.renewed(profile, self.plan, discipline), f"k={self.plan.k} is still solved")
                return None
            self.controller.solved_for = discipline
            new = self.solver.solved(profile, self.guard, discipline)
        except PlanError as error:
            if self.awaits_times:
                raise
            self.controller.hear(Event.STAYED, f"memory has become too short for another plan: {error}")
            return None
        return new if self.awaits_times else self._if_worth_it(profile, new)

    def _if_worth_it(self, profile: Profile, new: Plan) -> Plan | None:
        """The new plan, None where the one in force stays.

        Then the prediction for that one is renewed.
        """
        present = self.solver.renewed(profile, self.plan, self.discipline)
        wanted, hope = self.units.pieces_of(new), self.controller.hope
        steps_us = self.last.steps_us[-self._config.warmup_steps :]
        self.verdict = judge(expected_us(present, hope), expected_us(new, hope), steps_us, self._moves.cost_us(profile, wanted))
        if self.verdict.moves and wanted != self._states.placed:
            return replace(new, notes=(*new.notes, f"{_AGAIN} {self.last.steps_done} steps: {self.verdict}"))
        self._stay(profile, present, str(self.verdict))
        return None

    def _stay(self, profile: Profile, present: Plan, why: str) -> None:
        """The plan in force stays; what is said of it now follows from `profile`."""
        why = f"{_AGAIN} {self.last.steps_done} steps: {why}"
        inputs = inputs_of(profile, self.guard) | {"stream_share": present.inputs.get("stream_share", 0.0)}
        notes = (*(note for note in present.notes if not note.startswith(_AGAIN)), why)
        self.history[-1] = replace(present, inputs=present.inputs | inputs, notes=notes)
        self.solver.follow(present)
        self.controller.hear(Event.STAYED, why)

    @contextmanager
    def putting_in_force(self, new: Plan) -> Iterator[None]:
        """Use it around the moving of states to where `new` has them."""
        before, begin_s = self._states.placed, time.perf_counter()
        yield
        if self.awaits_times:
            self._looks = Delay()  # at other plans than this first one
        self._moves.took(before, (time.perf_counter() - begin_s) * 1e6)
        self.history.append(new)
        self.solver.follow(new)
        self._marks.clear()
        self._balancing.restart(new)
        self._stream_trial.restart(new)
        why = new.notes[-1] if new.notes and new.notes[-1].startswith(_AGAIN) else f"solved after {self.last.steps_done} steps"
        self.controller.hear(Event.PLACED if self._due is None else self._due.event, why)
