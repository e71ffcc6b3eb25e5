"""What eager code of the loop does to weights and gradients.

It finds committed weights, and what it writes becomes the masters.

    a guarded parameter is read    `settle_one`: the committed weight is there
    it is read or written          `touch`: no new weight may overtake it; what was written is
                                   followed before the next forward or `step()`
    a graph break                  `before_eager_code`: the same for what eager code reads
                                   before the forward ends (eager_reads.py)
    step()                         `before_step`: weights that others hold too may have been
                                   written (`held`); `stepped`: they are new before it returns

Guards and hooks hold an `EagerAccess` weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.capture.units import Unit
from hytrain_fx.planning.marks import StepMarks
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.session.callbacks import if_alive, weakly
from hytrain_fx.session.eager_reads import EagerReads
from hytrain_fx.session.nodes import SessionNodes
from hytrain_fx.session.outside_calls import OutsideCalls
from hytrain_fx.session.turns import Turns
from hytrain_fx.torch_private.tensors import without_torch_function
from hytrain_fx.weights.autocast_copies import AutocastCopies
from hytrain_fx.weights.guard import Elsewhere, GuardedParameter, guard_type
from hytrain_fx.weights.held import HeldWeights
from hytrain_fx.weights.host_copies import HostCopies
from hytrain_fx.weights.outside_writes import OutsideWrites
from hytrain_fx.weights.streamed_weights import StreamedWeights


class EagerAccess:
    """The weights of one session as eager code reaches them.

    is_over             whether the model is gone or closed: its parameters may outlive it

    touched             rows that eager code has reached since the last step()
    gradient_rows       rows that have had gradients from outside the graphs since the last step()
    last_gradient_rows  and before it
    """

    def __init__(
        self,
        table: ParameterTable,
        engine: Engine,
        states: StateStore,
        units: Sequence[Unit],
        nodes: SessionNodes,
        held: HeldWeights,
        turns: Turns,
        marks: StepMarks,
        outside: OutsideCalls,
        *,
        copies: bool,
        is_over: Callable[[], bool],
    ) -> None:
        self.touched: set[int] = set()
        self.gradient_rows: set[int] = set()
        self._gradient_read: set[int] = set()  # `id` of parameters whose real `.grad` somebody has got since the last step()
        self.last_gradient_rows: set[int] = set()
        self.move_waits = False  # for weights that are not the training's
        self.writes = OutsideWrites(table, engine, states, held)
        on_change = nodes.gradients.groups.forget
        self.copies = AutocastCopies(table, engine, states, self.writes, held, wanted=copies, on_change=on_change)
        self.streamed = StreamedWeights(table, engine, states, self.writes, held, nodes.fetched, lambda: turns.is_elsewhere)
        self.host_copies = HostCopies(table, engine, states, self.writes, weakly(self.settle), self.streamed.gathered_on_host)
        self._table = table
        self._engine = engine
        self._states = states
        self._nodes = nodes
        self._gradients = nodes.gradients
        self._held = held
        self._turns = turns
        self._marks = marks
        self._outside = outside
        self._is_over = is_over
        self._all_rows = tuple(range(len(table)))
        self._hooks: dict[int, RemovableHandle] = {}  # by row
        self._several_a_step = False  # whether a row has had gradients of several backwards since the last step()
        self._accumulates = False  # and before it
        # Gives every parameter its memory and weight, for good. Holds nothing of this.
        self.restore = partial(_call_each, (self.copies.restore, self.streamed.restore))
        nodes.gradients.on_eager_parts = weakly(self._listen)
        self.reads = EagerReads(table.parameters, units, weakly(self._wait_in_forward), weakly(self.settle), weakly(self._read_in_forward),
                                weakly(self.writes.wrote))
        self.writes.on_moved = weakly(self.reads.memory_moved)

    # ---- what guards and hooks call ----

    def guard_type(self) -> type[GuardedParameter]:
        """The class of guarded parameters that tell of each access."""
        return guard_type(if_alive(self.touch), if_alive(self.settle_one), self._turns.state, if_alive(self.may_lose_memory),
                          if_alive(self._elsewhere), self._gradient_read)

    @whole()
    def settle_one(self, parameter: nn.Parameter) -> None:
        """Have the committed weight there, for eager code that is about to reach it."""
        if self._is_over():
            return
        self.host_copies.follow()
        row = self._table.row_of[id(parameter)]
        if self._turns.is_elsewhere:
            self.streamed.require_loop()
            self._turns.read()
            self.copies.before_eager_code()  # from now on all memory stays: the next read may come while a graph runs
            self.streamed.keep_all()
            self.settle([row])
        else:
            with self._marks.held("read"):
                self.settle([row])
        self.fill([row])

    def _elsewhere(self, parameter: nn.Parameter) -> Elsewhere | None:
        """What saves and loads it on the host; fp32 memory is there where it has a bf16 copy.

        None for another thread than the loop's, whose first read has all memory stay.
        """
        if self._is_over() or self._turns.is_elsewhere or not self.host_copies.are_wanted:
            return None
        self.copies.fill([self._table.row_of[id(parameter)]])
        return self.host_copies

    def fill(self, rows: Sequence[int]) -> None:
        """Have the parameters of these rows show their weights, in memory of their own."""
        self.copies.fill(rows)
        self.streamed.fill(rows)

    def settle(self, rows: Sequence[int]) -> None:
        """Return when the new weights of these rows are there, whoever reads them."""
        self._engine.settle(self._states.pieces.rows(rows))
        if self._nodes.gathered:
            self._nodes.gathered.settle(rows)

    @whole()
    def touch(self, parameter: nn.Parameter) -> None:
        """Eager code is about to read or write this weight.

        It must find the committed one, and no new one may overtake it.
        """
        if self._is_over():
            return
        self._outside.touched()
        self._reached([self._table.row_of[id(parameter)]], in_forward=False)

    @property
    def reached(self) -> set[int]:
        """Rows whose weight or gradient eager code may have written or kept since the last step."""
        read = {self._table.row_of[of] for of in tuple(self._gradient_read)}
        return self.touched | self.gradient_rows | read

    def touched_parameters(self) -> Iterable[nn.Parameter]:
        """Those of `touched`."""
        return [self._table.parameters[row] for row in tuple(self.touched)]

    def may_lose_memory(self, parameter: nn.Parameter) -> bool:
        """Whether its memory may be given back, or `state_dict()` is to have a copy of it.

        Then each touch is seen, also after the loop's: any may be another thread's.
        """
        row = self._table.row_of[id(parameter)]
        return not self._is_over() and (
            self.copies.may_give_back(row) or self.streamed.may_lose_memory(row) or self.host_copies.are_wanted)

    def _reached(self, rows: Collection[int], *, in_forward: bool) -> None:
        """Eager code reads these weights, and may write to them.

        Where gradients are on, some may come from it.
        """
        self.writes.watch(rows)
        self.touched.update(rows)
        if torch.is_grad_enabled():
            self._gradients.parts.use_eagerly(rows, in_forward=in_forward)
            self._listen(rows)

    def follow_placement(self) -> None:
        """States rest elsewhere. Gradients that stay on the device are real tensors.

        What autograd adds to one cannot be told from what user code writes there.
        """
        self._listen(set(self._all_rows) - self._states.leaving())

    def _listen(self, rows: Iterable[int]) -> None:
        """From now on autograd tells when it has added to these rows' `.grad`.

        That takes 4 us a row and backward, so it does not tell of others, most of which graphs
        alone read.
        """
        for row in rows:
            if row not in self._hooks:
                parameter = self._table.parameters[row]
                with without_torch_function():
                    frozen = not parameter.requires_grad
                    if frozen:  # torch refuses a hook then, and it may be unfrozen unseen
                        parameter.requires_grad_(True)
                    try:
                        self._hooks[row] = parameter.register_post_accumulate_grad_hook(self._gradient_hook(row))
                    finally:
                        if frozen:
                            parameter.requires_grad_(False)

    def _gradient_hook(self, row: int) -> Callable[[torch.Tensor], None]:
        """What autograd is to call when it has added to this parameter's `.grad`."""
        of = weakref.ref(self)

        def on_gradient(parameter: torch.Tensor) -> None:
            found = of()
            if found is not None and found._gradients.is_eager(row):  # torch calls it for the graphs' None gradients too
                found._gradient_came(row)

        return on_gradient

    @whole()
    def _gradient_came(self, row: int) -> None:
        """Autograd has added what eager code makes of this row's gradient, the whole of a backward.

        It goes to the host at once where no graph makes a part of it, and no later backward adds to
        it: that would bring it back.
        """
        self._nodes.gradients_outside += 1
        self._marks.gradient_outside(self._nodes.unit_of[row])
        self._several_a_step |= row in self.gradient_rows
        self.gradient_rows.add(row)
        self._gradients.parts.several.add(row)
        if self._nodes.of_ranks:
            self._nodes.of_ranks.average_later(row, self._nodes.captured_rows)
        elif not (self._accumulates or self._several_a_step or row in self._nodes.captured_rows or self._is_over()):
            self._gradients.offload_eager(row)

    def close(self) -> None:
        """Autograd tells of no gradient any more, and no copy is kept."""
        self.host_copies.forget()
        for hook in self._hooks.values():
            hook.remove()

    # ---- what the session calls ----

    def enter_forward(self) -> None:
        """A compiled call begins.

        It reads the memory that parameters have now, and copies where it has them.
        """
        self.host_copies.follow()
        if torch.is_grad_enabled():
            self.host_copies.forget()
        self.touched |= self.writes.follow_memory()
        self.copies.enter_forward(self.touched)
        self.streamed.enter_forward(self.touched)

    def before_eager_code(self) -> None:
        """In a compiled call, before eager code of the model.

        It may read any weight, now or in its backward.
        """
        self.copies.before_eager_code()
        if not self.reads.begin():
            self.wait_for_all()

    def wait_for_all(self) -> None:
        """In a compiled call, before code that may read any weight unseen."""
        with self._marks.held("graph break"):
            self.wait(self._all_rows)
        self.copies.before_eager_code()
        self.streamed.keep_all()
        self._gradients.held.let_go_of_all()
        self._reached(self._all_rows, in_forward=True)

    @whole()
    def _wait_in_forward(self, rows: Sequence[int]) -> None:
        """An operator is about to read weights of these rows, a unit's."""
        self._nodes.wait_outside(rows)

    @whole()
    def _read_in_forward(self, rows: Sequence[int]) -> None:
        self.streamed.keep(rows)
        self._reached(rows, in_forward=True)

    def leave_forward(self) -> None:
        """The compiled call is over. Raises what a wait has raised in the middle of it."""
        self.reads.end()

    def follow_written_weights(self) -> None:
        """A weight written from outside (load_state_dict, an in-place edit) becomes the master too.

        Raises UnsupportedError.
        """
        self.host_copies.follow()
        self.touched |= self.writes.follow(self.touched)

    def follow_safely(self, *, before_move: bool = False) -> None:
        """The same before `step()`, where 16-bit weights may come back until then.

        before_move   those that rest elsewhere are followed too: they move with their states

        Raises UnsupportedError.
        """
        self.host_copies.follow()
        self.touched |= self.writes.follow_safely(self.touched, self._states.streamed if before_move else ())

    def not_followed(self) -> set[int]:
        """Rows whose weights are written, and may come back before `step()`."""
        return self.writes.not_followed(self.touched)

    def may_be_written(self, row: int) -> bool:
        """Whether the weight is perhaps not the one that the last update left."""
        return self.writes.may_be_written(row, self.touched)

    def before_states(self, *, may_stay: bool) -> None:
        """Before states are read or written. They are at rest.

        may_stay   16-bit weights that were written are read beside their masters
                   (`StateStore.whole_as_written`), so that reading changes nothing; not where other
                   ranks have a part of them
        """
        if self._is_over():
            return
        if may_stay and not self._nodes.gathered:
            self.follow_safely()
        else:
            self.follow_written_weights()

    def may_move(self) -> bool:
        """Whether states may move now.

        Not while a weight that rests elsewhere is not the training's: its home would have to be
        written too, and the loop may put back what was there.
        """
        self.move_waits = bool(self._states.streamed) and any(row in self._states.streamed for row in self.not_followed())
        return not self.move_waits

    def before_step(self) -> tuple[int, ...]:
        """Follow written weights; the rows whose weights somebody else holds."""
        self.streamed.units.before_step()
        self.follow_written_weights()
        held = self.streamed.held_anywhere(self._held.find(self.wait))
        if new := set(held) - self.touched:  # whoever holds them may have written to them already, and may read them until now
            self.writes.watch(new)
            self.touched |= new
            self.follow_written_weights()
        return held

    def stepped(self, rows: Collection[int], held: Sequence[int]) -> None:
        """A `step()` has begun the updates of `rows`.

        The weights of `held` are new when this returns, in the compute stream's order. So are those
        whose gradient on the device somebody keeps: it may be written to.
        """
        self.host_copies.forget()
        self.copies.committed(rows)
        self.streamed.units.committed(rows)
        self.writes.note(rows)
        self.writes.end_step()
        self._settle_held(held)
        if kept := self._gradients.held.kept_elsewhere(self.reached):
            self._engine.wait(self._states.pieces.rows(kept))  # gathers nothing: other ranks may have none that is kept
            self._gradients.held.let_go(kept)
        self._gradient_read.clear()
        self.touched = set(held)  # whoever holds them may write to them at any time
        self.last_gradient_rows, self.gradient_rows = self.gradient_rows, set()
        self._accumulates, self._several_a_step = self._several_a_step, False
        self._gradients.parts.step_ends()

    def _settle_held(self, held: Sequence[int]) -> None:
        if held:
            self.wait(held)
            self._gradients.held.let_go(held)
            self.fill(held)
            self.writes.watch(held)

    def wait(self, parameters: Sequence[int]) -> None:
        """The compute stream is to see the committed weights of these parameters."""
        self._engine.wait(self._states.pieces.rows(parameters))
        if self._nodes.gathered:
            self._nodes.gathered.of(parameters)


def _call_each(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
