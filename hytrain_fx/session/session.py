"""One compiled model: its parameters, graphs, engine and plan, from the first call to `close`.

    enter_forward   a new plan is put in force; parameters become plain
    (eager code)    of a forward that is not one graph: its operators wait for what they read
    (the graphs)    nodes call `SessionNodes`
    leave_forward   parameters are guarded again
    step            commits: hyper-parameters fixed, updates begin (or go on), and run beside the
                    launching thread
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from hytrain_fx.capture.parameters import ParameterTable, build_table
from hytrain_fx.capture.units import group_units
from hytrain_fx.config import Config
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.startup import Phase, Startup
from hytrain_fx.passes.ops import NODES
from hytrain_fx.passes.pipeline import chosen_passes
from hytrain_fx.planning.marks import Mark, StepMarks
from hytrain_fx.planning.planning import Planning
from hytrain_fx.planning.watches import FinishedStep
from hytrain_fx.runtime.engine import CommitItem, Engine, settling
from hytrain_fx.runtime.garbage import uncollected
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.runtime.launch import make_engine
from hytrain_fx.runtime.ranks import ranks_that_begin_alike
from hytrain_fx.session.callbacks import shut_down
from hytrain_fx.session.eager_access import EagerAccess
from hytrain_fx.session.finite_steps import FiniteSteps
from hytrain_fx.session.foresight import Foresight, Speculate
from hytrain_fx.session.graphs import SessionGraphs
from hytrain_fx.session.memory_pressure import MemoryPressure
from hytrain_fx.session.nodes import SessionNodes
from hytrain_fx.session.outside_calls import OutsideCalls
from hytrain_fx.session.resources import Resources
from hytrain_fx.session.shown_clock import ShownClock
from hytrain_fx.session.streaming import stream_weights
from hytrain_fx.session.turns import Turns, in_turn
from hytrain_fx.session.update import OptimizerUpdate
from hytrain_fx.torch_private.tensors import increment_versions, set_grad, without_torch_function
from hytrain_fx.weights.guard import PlainWhileRunning, unguard_all
from hytrain_fx.weights.held import HeldWeights
from hytrain_fx.weights.places import ParameterPlaces


class Session:
    """Controls one compiled model.

    Made by `api.compile`; found again through the model's `CallGate`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> None:
        self.clock = ShownClock()
        self.turns = Turns()
        self._passes = chosen_passes(config.passes, streamed=config.fetches)
        table = build_table(model, optimizer)
        self.ranks = ranks_that_begin_alike(model, config.process_group, config.loader or ())
        self.frozen_states: dict[torch.Tensor, dict[str, Any]] = {}  # loaded for parameters that are not trained, and given out as they are
        self.update = OptimizerUpdate(optimizer, table, self.ranks, config.moments)
        self.table: ParameterTable = self.update.table
        self.rule = self.update.rule
        self.config = config = self.update.config(config)
        self.groups: list[dict[str, Any]] = optimizer.param_groups
        self.units = group_units(model, self.table.names)
        self.marks = StepMarks(self.table.device)
        self.step_us: deque[float] = deque(maxlen=31)  # wall time between calls of step(), newest last
        self.steps_done = 0
        self.in_step_us = 0.0  # how long the last call of step() took
        self.depth = 0
        self._last_step_s: float | None = None
        self.closed = False
        self.held = HeldWeights(self.table.parameters, self.table.names)
        with self.update.left_on_error(), self.clock.phase(Phase.ENGINE):
            self.engine: Engine = make_engine(config, self.table.parameters)
        try:
            with self.update.left_on_error(), self.held.ours():
                self._build(model)
        except BaseException:
            self.engine.close()  # a refused model keeps no threads
            raise

    # ---- construction ----

    def _build(self, model: nn.Module) -> None:
        self.states = self.update.make_states(self.engine, self.units)
        self._probe = self.update.make_probe(self.engine)
        self.resources = Resources(self.states, self.table, self.engine, self.config, self.clock)
        self.nodes = SessionNodes(self.table, self.engine, self.states, self.marks, self.ranks, self.units,
                                  streams=self.config.fetches, micro_batches=self.config.micro_batches)
        self.builder = self.update.make_builder(self.states, self.nodes.gradients)
        self.finite_steps = FiniteSteps(self.engine, self.builder, self.states, self.nodes.gradients.slots, self.nodes.gathered,
                                        reads_at_once=self.table.device.type == "cpu")
        self.finite_steps.use(self.config.on_nonfinite)
        self.speculate(self.config.speculate, self.table.device.type == "cuda")
        self.planning = Planning(self.config, self.table, self.units, self.states, self.engine, self.marks, self.ranks)
        self.resources.allocate(self.planning.first_placement, self.ranks)
        self.number = NODES.register(self.nodes, self.table.parameters, self.states.copies.tensors, self.nodes.running)
        self._outside = OutsideCalls(model)
        self.eager = EagerAccess(self.table, self.engine, self.states, self.units, self.nodes, self.held, self.turns, self.marks,
                                 self._outside, copies=self.planning.may_copy, is_over=lambda: not self._shut_down.alive)
        if self.nodes.gathered:
            self.nodes.gathered.unseen = self.eager.reads.in_graph
        self.copies = self.eager.copies
        stream_weights(self.eager.streamed, self.states, self.engine, self.resources, self.ranks, self.planning, self.config)
        self.plain = PlainWhileRunning(self.table.parameters, self.eager.guard_type(), self.eager.touched_parameters)
        copies = self.copies if self.engine.takes_copies and self.planning.may_copy else None
        self.pressure = MemoryPressure(self.planning, self.resources, self.nodes, self.ranks)
        self.graphs = SessionGraphs(self.number, self.table, self.units, self.states.pieces, self.nodes, self.plain.while_running,
                                    self.eager.reads, self.pressure.noticed, self.planning.renumber, self._compiling, copies,
                                    self.eager.streamed, self._passes, self.config.dump)
        self.capture = self.planning.units.capture = self.graphs.capture
        self._all_rows = tuple(range(len(self.table)))
        self._install(model)

    def _install(self, model: nn.Module) -> None:
        for number, rows in ((unit.number, unit.rows) for unit in self.units):
            for row in rows:
                self.nodes.unit_of[row] = number
        self.places = ParameterPlaces(model, self.table)
        self.eager.follow_placement()
        self.plain.guard()
        settle = settling(self.engine)
        self.turns.keep_whole_in_forks(self.nodes.gathered.before_fork(settle) if self.nodes.gathered else settle)
        # Not a reference to the session: it must not be kept alive by its own end.
        ends = (self.engine, self.number, os.getpid(), weakref.ref(model), self.eager.restore)
        self._shut_down = weakref.finalize(model, shut_down, *ends)

    # ---- the loop ----

    @in_turn
    def enter_forward(self) -> None:
        """Before the compiled call."""
        if self.depth > 0:
            self.depth += 1
            return
        self.finite_steps.raise_told(wait=False)
        if self.turns.must_settle:
            self.settle()
        self.turns.called_elsewhere |= self.turns.is_elsewhere
        self.eager.enter_forward()
        if torch.is_grad_enabled():  # in an evaluation weights may be there that are not the training's (an average of them)
            with self.clock.phase(Phase.PLAN):
                self.follow_plan()
            self.nodes.gradients.parts.call_begins()
            self._outside.called()
        if self.clock.running:
            self.clock.forward_begins(self._at_full_speed)
        self.marks.silent_thread = 0 if torch.is_grad_enabled() else threading.get_ident()  # an evaluation leaves no marks
        self.marks.mark(Mark.FORWARD_BEGIN)
        if not self.capture.graphs:
            self.clock.open(Phase.COMPILE_FORWARD)  # tracing comes before anything of ours is called
        self.plain.begin()
        self.depth = 1  # not before: after an error in here the next forward is an outer one again

    def follow_plan(self) -> None:
        """Put a due plan in force, if no gradient is alive (it would lose its slot).

        Raises nothing.
        """
        planning = self.planning
        if not planning.is_due or self.nodes.gradients.any_in_place() or not self.eager.may_move():
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

    @in_turn
    def leave_forward(self) -> None:
        """After the compiled call."""
        self.depth -= 1
        if self.depth == 0:
            try:
                self.clock.close(Phase.COMPILE_FORWARD)
                self.marks.mark(Mark.FORWARD_END)
            finally:
                self.marks.silent_thread = 0
                self.plain.end()
                self.eager.leave_forward()

    @contextmanager
    def _compiling(self, phase: Phase) -> Iterator[None]:
        with self.turns.compiles, self.clock.phase(phase):
            yield

    def step(self, skip: torch.Tensor | None = None) -> None:
        """`_step` in its turn: no other thread is in the compiled call. It makes no garbage."""
        with self.turns.calls, self.turns.state, uncollected():
            if self.depth > 0:
                raise UnsupportedError("optimizer.step() was called inside the compiled call of the model; have its forward, or the method "
                                       "that was compiled, return the loss, and call backward() and step() in the loop")
            self._step(skip)

    @whole()
    def _step(self, skip: torch.Tensor | None = None) -> None:
        """Commit the gradients of this step with the hyper-parameters that the groups have now.

        `skip`: a 0-dim fp32 tensor on the device; where it is not zero, weights, states and step
        counts stay as they are.
        """
        self.finite_steps.raise_told(wait=True)
        self.states.require_whole()
        self.places.require_trained()
        self.nodes.before_step(self.eager.gradient_rows)
        begin_s = time.perf_counter()
        self.marks.note(Mark.STEP_BEGIN)
        with torch.no_grad(), without_torch_function():
            self.nodes.gradients.parts.settle()
            held = self.eager.before_step()
            read = self._all_rows if self.turns.called_elsewhere else ()  # perhaps after the backward has released them
            items: Sequence[CommitItem] = self.builder.build(self.groups, self.eager.reached.union(read))
            items = self.finite_steps.commit(items, self.groups, skip, self.steps_done + 1)
            self.foresight.stepped(items, self.planning.aside.delay.lap_s())
            self.nodes.committed(rows := self.builder.parameters_of(items))
            self.nodes.gradients.slots.taken.update([item.row for item in items if item.grad is None and item.row < len(self.table)])
            increment_versions([self.table.parameters[row] for row in rows])
            del items  # whoever has a gradient on the device now may write to it
            self.eager.stepped(rows, held)
        self.turns.stepped()
        self.plain.guard()
        self._end_step(begin_s)
        self.finite_steps.raise_told(wait=self.finite_steps.reads_at_once)

    def _end_step(self, begin_s: float) -> None:
        now_s = time.perf_counter()
        self.in_step_us = (now_s - begin_s) * 1e6
        if self._last_step_s is not None:
            self.step_us.append((now_s - self._last_step_s) * 1e6)
        self._last_step_s = now_s
        self.marks.note(Mark.STEP_END)
        self.marks.end_step()
        self.steps_done += 1
        steps_us, ahead = tuple(self.step_us), self.foresight
        self.planning.after_step(FinishedStep(self.steps_done, steps_us, ahead.will_begin_early, ahead.awaits_factors, ahead.tries))
        if self.clock.step_ends():
            self.resources.full_speed()
        self._outside.stepped(self.planning.captured_steps > 0, bool(self.eager.last_gradient_rows))

    @property
    def _at_full_speed(self) -> bool:
        """Whether the plan in force is one to stay with, and the cold steps are over."""
        cold_steps = self.planning.steps_to_measure - self.config.warmup_steps
        return self.steps_done >= cold_steps and not self.planning.awaits_times

    @property
    def startup(self) -> Startup:
        """Time from `compile()` to the first full-speed step, by phase, so far."""
        return self.clock.report()

    @property
    def unit_of_rows(self) -> dict[int, int]:
        """The unit of each row of the engine that is in use."""
        return {row: self.nodes.unit_of[self.states.pieces.parameter(row)] for row in self.states.placement}

    def record(self, on: bool) -> None:
        """Keep what runs when. Meanwhile no plan is made: the engine's records are the caller's."""
        self.planning.stop_measuring(recording=on)
        self.engine.record(on)
        self.nodes.fetched.times.record(on)

    def speculate(self, how: Speculate, runs_behind: bool) -> None:
        """Begin to learn, from nothing, whether updates may begin before `step()`."""
        self.foresight = Foresight(how, self.engine, self.builder, self.groups, self.nodes.gradients.slots.generation, runs_behind)
        # Another thread may be reading states, which a guess would change.
        self.nodes.gradients.on_sent = self.turns.if_free(self.foresight.sent)

    @in_turn
    def zero_grad(self) -> None:
        """Drop all gradients, also those that are in their slots."""
        with whole(), without_torch_function():
            for group in self.groups:
                for parameter in group["params"]:
                    set_grad(parameter, None)
            self.nodes.gradients.parts.close()
            self.engine.discard(range(self.engine.rows))
            self.nodes.gradients.slots.taken.update(self._all_rows)
            self.foresight.dropped()
            if self.nodes.of_ranks:
                self.nodes.of_ranks.dropped()

    @in_turn
    @whole()
    def drain(self) -> None:
        """Return when every committed weight is on the device and every state at rest."""
        if not self.closed:
            self.engine.drain(range(self.engine.rows))

    @in_turn
    @whole()
    def settle(self) -> None:
        """Return when every committed update is done and every weight on the device.

        States rest where their updates have left them.
        """
        if not self.closed:
            self.engine.settle(range(self.engine.rows))
            if self.nodes.gathered:
                self.nodes.gathered.settle()
            self.eager.fill(self._all_rows)

    @in_turn
    def place(self, plan: Plan) -> None:
        """Move the states to where `plan` has them. All gradients must have been dropped."""
        self.drain()
        self.eager.follow_safely(before_move=True)  # or a master that moves to the device would be written over them
        self.nodes.gradients.before_move()
        self.engine.discard(range(self.engine.rows))  # gradients that were dropped by hand still count as there
        wanted = self.planning.units.pieces_of(plan)
        if wanted != self.states.placed:
            self.resources.announce(wanted)
        with self.eager.streamed.moving(wanted), self.held.ours(), without_torch_function():
            self.resources.move(wanted)
        self.copies.moved()
        self.eager.follow_placement()

    def probe_device_update_us_per_param(self) -> float:
        """Microseconds a parameter that the update on the device takes.

        It is timed on a row made for the purpose.
        """
        device = self.table.device
        self.builder.settle_steps()  # its commits come once we know whether the last one was left out
        with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):  # random numbers are the training's own
            return self._probe.us_per_param()

    @in_turn
    def follow_written_weights(self) -> None:
        """A weight written from outside (load_state_dict, an in-place edit) becomes the master too.

        Raises UnsupportedError.
        """
        if not self.closed:
            self.eager.follow_written_weights()

    def gather_loaded(self, parameters: Collection[int]) -> None:
        """States of these were written: their weights are to come from all ranks, until the end."""
        if self.nodes.gathered and not self.closed:
            self.nodes.gathered.loaded(parameters)

    # ---- the end ----

    @in_turn
    def leave_ranks(self) -> None:
        """This rank has failed, and others may not come any more: close() waits for none of them.

        Weights that they update stay as they were; of sharded ones it has its shards, else NaN.
        """
        if self.nodes.gathered:
            self.nodes.gathered.leave()

    def close(self) -> None:
        """Finish what is committed and stop the threads.

        The model stays as trained, the states readable. Safe to call twice.
        """
        with self.turns.calls, self.turns.state:
            self._close()

    def _close(self) -> None:
        with ExitStack() as ends:  # all of them, though one raises
            for end in (self._let_go, self._shut_down, self.eager.restore):
                ends.callback(end)
            if self.nodes.gathered and not (self.closed or self.nodes.gathered.left):
                self.settle()

    def _let_go(self) -> None:
        self.closed = True
        self.states.leave_weights()
        self.nodes.gradients.end()
        self.marks.clear()
        self.capture.graphs.clear()
        self.eager.close()
        unguard_all(self.table.parameters)
