"""One compiled model: its parameters, graphs, engine and plan, from the first call to `close`.

    enter_forward   a new plan is put in force; parameters become plain
    (eager code)    of a forward that is not one graph: all weights are waited for
    (the graphs)    nodes call `SessionNodes`
    leave_forward   parameters are guarded again
    step            commits: hyper-parameters fixed, updates begin (or continue) behind the
                    launching thread
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hytrain_fx.capture.parameters import ParameterTable, build_table
from hytrain_fx.capture.units import group_units, unit_of_rows
from hytrain_fx.config import Config
from hytrain_fx.errors import StatesError
from hytrain_fx.ir.plan import PlacedPiece, Plan
from hytrain_fx.ir.startup import Phase, Startup, StartupClock
from hytrain_fx.passes.ops import NODES
from hytrain_fx.passes.pipeline import chosen_passes
from hytrain_fx.planning.marks import Mark, StepMarks
from hytrain_fx.planning.planning import Planning
from hytrain_fx.planning.watches import FinishedStep
from hytrain_fx.runtime.any_optimizer.rule import RuleProbe, UpdateRule
from hytrain_fx.runtime.engine import Engine, RowSpec, settling
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.runtime.launch import make_engine, ring_bytes_for, torch_engine_config
from hytrain_fx.runtime.probe import UpdateProbe
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.runtime.updates import kernel_update
from hytrain_fx.session.call_gate import CallGate
from hytrain_fx.session.callbacks import eager_gradient_of, if_alive, shut_down, weakly
from hytrain_fx.session.commit import CommitBuilder, RuleCommitBuilder
from hytrain_fx.session.foresight import Foresight, Speculate
from hytrain_fx.session.graphs import SessionGraphs
from hytrain_fx.session.nodes import SessionNodes
from hytrain_fx.session.resources import Resources, pinning_of
from hytrain_fx.session.turns import Turns, in_turn
from hytrain_fx.torch_private.modules import plain_call
from hytrain_fx.torch_private.tensors import (
    compiled_call,
    compiled_call_of,
    increment_versions,
    set_compiled_call,
    set_grad,
    without_torch_function,
)
from hytrain_fx.weights.autocast_copies import AutocastCopies
from hytrain_fx.weights.guard import PlainWhileRunning, guard_type, unguard_all
from hytrain_fx.weights.held import HeldWeights
from hytrain_fx.weights.outside_writes import OutsideWrites
from hytrain_fx.weights.places import ParameterPlaces


class Session:
    """Controls one compiled model. Made by `api.compile`; found again through the model's `CallGate`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> None:
        self._clock = StartupClock()
        self.turns = Turns()
        self.config = config
        self._passes = chosen_passes(config.passes)
        self.table: ParameterTable = build_table(model, optimizer)
        self.frozen_states: dict[torch.Tensor, dict[str, Any]] = {}  # loaded for parameters that are not trained, and given out as they are
        self._update = kernel_update(optimizer)
        self.rule = None if self._update else UpdateRule(optimizer, self.table.parameters, self.table.names)
        if self.rule is not None:
            self.config = config = torch_engine_config(config, self.rule.name)
        self.groups: list[dict[str, Any]] = optimizer.param_groups
        self.units = group_units(model, self.table.names)
        self.marks = StepMarks(self.table.device)
        self.step_us: deque[float] = deque(maxlen=31)  # wall time between calls of step(), newest last
        self.touched: set[int] = set()  # rows that eager code has reached since the last step()
        self.eager_rows: set[int] = set()  # rows that have had gradients from outside the graphs since the last step(),
        self.last_eager_rows: set[int] = set()  # and before it
        self.steps_done = 0
        self.in_step_us = 0.0  # how long the last call of step() took
        self._depth = 0
        self._last_step_s: float | None = None
        self._hooks: list[RemovableHandle] = []
        self.closed = False
        self._half_loaded: BaseException | None = None  # what ended the last loading of states
        self.held = HeldWeights(self.table.parameters, self.table.names)
        with self._clock.phase(Phase.ENGINE):
            self.engine: Engine = make_engine(config, self.table.parameters)
        try:
            with self.held.ours():
                self._build(model, optimizer)
        except BaseException:
            self.engine.close()  # a refused model keeps no threads
            raise
        self._clock.built()

    # ---- construction ----

    def _build(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.states = self._make_states(optimizer)
        self.nodes = SessionNodes(self.table, self.engine, self.states, self.marks)
        self.builder = self._make_builder()
        self.speculate(self.config.speculate, self.table.device.type == "cuda")
        self.planning = Planning(self.config, self.table, self.units, self.states, self.engine, self.marks)
        self._allocate(self.planning.first_placement())
        self.number = NODES.register(self.nodes, self.table.parameters, self.states.copies.tensors)
        self._writes = OutsideWrites(self.table, self.engine, self.states, self.held)
        wanted = self.config.autocast_copies and self.states.may_halve
        on_change = self.nodes.gradients.groups.forget
        self.copies = AutocastCopies(self.table, self.engine, self.states, self._writes, self.held, wanted=wanted, on_change=on_change)
        copies = self.copies if self.engine.takes_copies and wanted else None
        guarded = guard_type(if_alive(self.touch), if_alive(self.settle_one), self.turns.state, if_alive(self.may_lose_memory))
        self.plain = PlainWhileRunning(self.table.parameters, guarded)
        self.graphs = SessionGraphs(self.number, self.table, self.units, self.states.pieces, self.nodes, self.plain.while_running,
                                    self._compiling, copies, self._passes, self.config.dump)
        self.capture = self.planning.units.capture = self.graphs.capture
        self._all_rows = tuple(range(len(self.table)))
        self._install(model)

    def _make_builder(self) -> CommitBuilder:
        if self.rule is not None:
            return RuleCommitBuilder(self.table, self.states, self.nodes.gradients, self.rule)
        assert self._update is not None
        return CommitBuilder(self.table, self.states, self.nodes.gradients, self._update.scalars)

    def _make_states(self, optimizer: torch.optim.Optimizer) -> StateStore:
        unit_of = unit_of_rows(self.units)
        for row, parameter in enumerate(self.table.parameters):
            self.engine.add_row(RowSpec(parameter.numel(), unit_of[row], parameter.detach(), self.table.names[row]))
        parameters, rule, rows = self.table.parameters, self.rule, range(len(self.table))
        if rule is not None:
            self._probe: UpdateProbe = RuleProbe(self.engine, parameters, rule)
            tables = [rule.table(row) for row in rows]
        else:
            assert self._update is not None
            self._probe = UpdateProbe(self.engine, parameters, self._update)
            group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
            tables = [self._update.table.under(group_of[id(p)]) for p in parameters]
        states = StateStore(parameters, [unit_of[row] for row in rows], tables, self.engine, self.table.names)
        self._ring_bytes = partial(ring_bytes_for, parameters, self.config)
        self.resources = Resources(states, self.table.device, self._ring_bytes, self._clock)
        return states

    def _allocate(self, placed: Sequence[PlacedPiece]) -> None:
        self.resources.announce(placed)
        with self._clock.phase(Phase.MASTERS):
            self.states.allocate(placed, self.config.host_memory)
        self._set_transit(placed)
        self._clock.pinned_bytes, pinning_us = pinning_of(self.states.slabs)
        self._clock.reassign(Phase.MASTERS, Phase.HOST_MEMORY, pinning_us)

    def _install(self, model: nn.Module) -> None:
        for number, rows in ((unit.number, unit.rows) for unit in self.units):
            for row in rows:
                self.nodes.unit_of[row] = number
        of = self.config
        backend, told = weakly(self.capture.backend), weakly(self.before_eager_code)
        compile_call = partial(compiled_call_of, model, backend, of.dynamic, of.mode, of.options, told)
        self.places = ParameterPlaces(model, self.table)
        set_compiled_call(model, CallGate(compile_call, plain_call(model), self, self.places))
        for row, parameter in enumerate(self.table.parameters):
            self._hooks.append(parameter.register_post_accumulate_grad_hook(eager_gradient_of(weakref.ref(self), row)))
        self.plain.guard()
        self.turns.keep_whole_in_forks(settling(self.engine))
        # Not a reference to the session: it must not be kept alive by its own end.
        ends = (self.engine, self.number, os.getpid(), weakref.ref(model), self.copies.restore)
        self._shut_down = weakref.finalize(model, shut_down, *ends)

    # ---- the loop ----

    @in_turn
    def enter_forward(self) -> None:
        """Before the compiled call."""
        if self._depth > 0:
            self._depth += 1
            return
        if self.turns.must_settle:
            self.settle()
        self.turns.called_elsewhere |= self.turns.is_elsewhere
        self.touched |= self._writes.follow_memory()
        self.copies.enter_forward(self.touched)
        if torch.is_grad_enabled():  # in an evaluation weights may be there that are not the training's (an average of them)
            with self._clock.phase(Phase.PLAN):
                self._follow_plan()
            self.nodes.gradients.parts.call_begins()
        if self._clock.running:
            self._clock.forward_begins(self._at_full_speed)
        self.marks.silent_thread = 0 if torch.is_grad_enabled() else threading.get_ident()  # an evaluation leaves no marks
        self.marks.mark(Mark.FORWARD_BEGIN)
        if not self.capture.graphs:
            self._clock.open(Phase.COMPILE_FORWARD)  # tracing comes before anything of ours is called
        self.plain.begin()
        self._depth = 1  # not before: after an error in here the next forward is an outer one again

    def _follow_plan(self) -> None:
        """Put a due plan in force, if no gradient is alive (it would lose its slot). Raises nothing."""
        planning = self.planning
        if not planning.is_due or self.nodes.gradients.any_in_place():
            return
        with planning.making_a_plan():
            if planning.profile is None:
                self.drain()
            plan = planning.next_plan(self.probe_device_update_us_per_param)
            if plan is not None:
                with planning.putting_in_force(plan):
                    self._place_or_stay(plan)

    def _place_or_stay(self, plan: Plan) -> None:
        try:
            self.place(plan)
        except Exception:
            with suppress(Exception):  # each row trains on from where it is; the plan in force is to say where that is
                self.place(self.planning.plan)
            raise

    def must_capture_anew(self) -> bool:
        """Whether the call to come needs graphs other than those that there are."""
        return self.graphs.must_capture_anew()

    def before_eager_code(self) -> None:
        """In a compiled call, before code of the model that is not one graph: it may read any weight, now or in its backward."""
        with self.marks.held("graph break"):
            self._wait(self._all_rows)
        self.copies.before_eager_code()
        self.nodes.gradients.let_go_of_all()
        self._writes.watch(self._all_rows)
        self.touched.update(self._all_rows)

    @in_turn
    def leave_forward(self) -> None:
        """After the compiled call."""
        self._depth -= 1
        if self._depth == 0:
            try:
                self._clock.close(Phase.COMPILE_FORWARD)
                self.marks.mark(Mark.FORWARD_END)
            finally:
                self.marks.silent_thread = 0
                self.plain.end()

    @contextmanager
    def _compiling(self, phase: Phase) -> Iterator[None]:
        with self.turns.compiles, self._clock.phase(phase):
            yield

    def step(self, skip: torch.Tensor | None = None) -> None:
        """`_step` in its turn: no other thread is in the compiled call."""
        with self.turns.calls, self.turns.state:
            self._step(skip)

    @whole()
    def _step(self, skip: torch.Tensor | None = None) -> None:
        """Commit the gradients of this step with the hyper-parameters that the groups have now.

        `skip`: a 0-dim fp32 tensor on the device; where it is not zero, weights, states and step
        counts stay as they are.
        """
        self.require_whole_states()
        self.places.require_trained()
        begin_s = time.perf_counter()
        self.marks.note(Mark.STEP_BEGIN)
        with torch.no_grad(), without_torch_function():
            if self.nodes.gradients.parts.open:
                self.nodes.gradients.end_sums()  # of a backward that ended in an error
            self.follow_written_weights()
            held = self.held.find(self._wait)
            self._follow_new_holders(set(held) - self.touched)
            read = self._all_rows if self.turns.called_elsewhere else ()  # perhaps after the backward has released them
            items = self.builder.build(self.groups, self.touched.union(self.eager_rows, read))
            if skip is None:
                self.engine.commit(items)
                self.builder.committed(items)
            else:
                self.engine.commit_unless(items, skip)
                self.builder.committed(items)
                self.builder.doubt(items, self.engine.skipped)
            self.foresight.stepped(items)
            rows = self.builder.parameters_of(items)
            self.nodes.committed(rows)
            self.nodes.gradients.taken.update(item.row for item in items if item.grad is None and item.row < len(self.table))
            increment_versions([self.table.parameters[row] for row in rows])
            self.copies.committed(rows)
            self._writes.note(rows)
            self._writes.end_step()
            self._settle_held(held)
        self.touched = set(held)  # whoever holds them may write to them at any time
        self.last_eager_rows, self.eager_rows = self.eager_rows, set()
        self.nodes.gradients.parts.used_eagerly.clear()
        self.turns.stepped()
        self.plain.guard()
        self._end_step(begin_s)

    def _follow_new_holders(self, rows: set[int]) -> None:
        """Whoever holds these weights, found just now, may have written to them already, and may read them until now."""
        if rows:
            self._writes.watch(rows)
            self.touched |= rows
            self.follow_written_weights()

    def _settle_held(self, held: Sequence[int]) -> None:
        """Weights that others hold too are new before step() returns, in the order of the compute stream."""
        if held:
            self._wait(held)
            self.nodes.gradients.let_go(held)
            self.copies.fill(held)
            self._writes.watch(held)

    def _end_step(self, begin_s: float) -> None:
        now_s = time.perf_counter()
        self.in_step_us = (now_s - begin_s) * 1e6
        if self._last_step_s is not None:
            self.step_us.append((now_s - self._last_step_s) * 1e6)
        self._last_step_s = now_s
        self.marks.note(Mark.STEP_END)
        self.marks.end_step()
        self.steps_done += 1
        foresight = self.foresight
        self.planning.after_step(
            FinishedStep(self.steps_done, tuple(self.step_us), foresight.will_go_ahead, foresight.awaits_factors))
        if self._clock.step_ends():
            self.resources.full_speed()

    @property
    def _at_full_speed(self) -> bool:
        """Whether the plan in force is one to stay with, and the cold steps are behind."""
        cold_steps = self.planning.steps_to_measure - self.config.warmup_steps
        return self.steps_done >= cold_steps and not self.planning.awaits_times

    @property
    def startup(self) -> Startup:
        """Time from `compile()` to the first full-speed step, by phase, so far."""
        return self._clock.report()

    @property
    def unit_of_rows(self) -> dict[int, int]:
        """The unit of each row of the engine that is in use."""
        return {row: self.nodes.unit_of[self.states.pieces.parameter(row)] for row in self.states.placement}

    def speculate(self, how: Speculate, runs_behind: bool) -> None:
        """Begin to learn, from nothing, whether updates may begin before `step()`."""
        self.foresight = Foresight(how, self.engine, self.builder, self.groups, self.nodes.gradients.generation, runs_behind)
        # Another thread may be reading states, which a guess would change.
        self.nodes.gradients.on_sent = self.turns.if_free(self.foresight.sent)

    @in_turn
    def zero_grad(self) -> None:
        """Drop all gradients, also those that are in their slots."""
        with whole(), without_torch_function():
            for group in self.groups:
                for parameter in group["params"]:
                    set_grad(parameter, None)
            self.nodes.gradients.parts.open.clear()
            self.engine.discard(range(self.engine.rows))
            self.nodes.gradients.taken.update(self._all_rows)
            self.foresight.dropped()

    @in_turn
    @whole()
    def drain(self) -> None:
        """Return when every committed weight is on the device and every state at rest."""
        if not self.closed:
            self.engine.drain(range(self.engine.rows))

    @in_turn
    @whole()
    def settle(self) -> None:
        """Return when every committed update is done and every weight on the device; states rest where their updates have left them."""
        if not self.closed:
            self.engine.settle(range(self.engine.rows))
            self.copies.fill(self._all_rows)

    @whole()
    def settle_one(self, parameter: nn.Parameter) -> None:
        """Have the committed weight there, for eager code that is about to reach it."""
        if not self._shut_down.alive:
            return
        row = self.table.row_of[id(parameter)]
        if self.turns.is_elsewhere:
            self.turns.read()
            self.copies.before_eager_code()  # from now on all fp32 memory stays: the next read may come while a graph runs
            self.engine.settle(self.states.pieces.of(row))
        else:
            with self.marks.held("read"):
                self.engine.settle(self.states.pieces.of(row))
        self.copies.fill([row])

    @whole()
    def touch(self, parameter: nn.Parameter) -> None:
        """Eager code is about to read or write this weight: it must find the committed one, and no new one may overtake it."""
        if not self._shut_down.alive:
            return  # a parameter that has outlived its model
        row = self.table.row_of[id(parameter)]
        self._writes.watch([row])
        self.touched.add(row)
        if torch.is_grad_enabled():
            self.nodes.gradients.parts.used_eagerly.add(row)

    def may_lose_memory(self, parameter: nn.Parameter) -> bool:
        """Whether its fp32 memory may be given back.

        Then each touch is seen, also after the loop's: any may be another thread's.
        """
        return self._shut_down.alive and self.copies.may_give_back(self.table.row_of[id(parameter)])

    @in_turn
    def place(self, plan: Plan) -> None:
        """Move the states to where `plan` has them. All gradients must have been dropped."""
        self.drain()
        self.follow_written_weights()  # or a master that moves to the device would be written over them
        self.nodes.gradients.before_move()
        self.engine.discard(range(self.engine.rows))  # gradients that were dropped by hand still count as there
        wanted = self.planning.units.pieces_of(plan)
        if wanted != self.states.placed:
            self.resources.announce(wanted)
        with self.held.ours(), self._clock.phase(Phase.MOVE), without_torch_function():
            self.states.move(wanted, self.config.host_memory)
        self._set_transit(wanted)
        self.copies.moved()

    def _wait(self, parameters: Sequence[int]) -> None:
        """The compute stream is to see the committed weights of these parameters."""
        self.engine.wait(self.states.pieces.rows(parameters))

    def _set_transit(self, placed: Sequence[PlacedPiece]) -> None:
        """What streaming does not need of the device's memory is lent to gradients on their way."""
        streams = any(of.placement.visits_device for of in placed)
        self.engine.set_transit(self._ring_bytes(streams), streams)

    def probe_device_update_us_per_param(self) -> float:
        """Microseconds that the update on the device takes per parameter, on a row made for the purpose."""
        device = self.table.device
        self.builder.settle_steps()  # its commits come after the word on whether the last one was left out
        with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):  # random numbers are the training's own
            return self._probe.us_per_param()

    @in_turn
    def follow_written_weights(self) -> None:
        """A weight written from outside (load_state_dict, an in-place edit) becomes the master too. Raises UnsupportedError."""
        if not self.closed:
            self.touched |= self._writes.follow(self.touched)

    @contextmanager
    def loading(self, *, all_states: bool) -> Iterator[None]:
        """While optimizer states are overwritten: after an error inside, they are a mixture until all of them have been loaded."""
        before = None if all_states else self._half_loaded
        try:
            yield
        except BaseException as error:
            self._half_loaded = error
            raise
        self._half_loaded = before

    def require_whole_states(self) -> None:
        """Raises StatesError where the states are a mixture of a checkpoint and what was there before."""
        if self._half_loaded is not None:
            raise StatesError(
                f"loading optimizer states ended in an error ({type(self._half_loaded).__name__}: {self._half_loaded}), so they are a "
                "mixture of old and new ones; call optimizer.load_state_dict() again, and load the model's weights again before it"
            ) from self._half_loaded

    # ---- the end ----

    def close(self) -> None:
        """Finish what is committed and stop the threads; the model stays as trained, the states readable. Safe to call twice."""
        with self.turns.calls, self.turns.state:
            self._close()

    def _close(self) -> None:
        try:
            self.copies.restore()
            self._shut_down()
        finally:
            self.closed = True
            self.nodes.gradients.end()
            self.marks.clear()
            self.capture.graphs.clear()
            for hook in self._hooks:
                hook.remove()
            unguard_all(self.table.parameters)


def find_session(model: nn.Module) -> Session | None:
    """The session of a compiled model, None where it has none."""
    gate = compiled_call(model)
    session = gate.session if isinstance(gate, CallGate) else None
    return session if isinstance(session, Session) else None
