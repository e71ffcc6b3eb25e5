"""The gradients of one session, from the graphs to the engine or to `.grad`.

    row on the host                      gradient to its slot, `.grad` becomes a stand-in
    row updated on the device            gradient copied into a real `.grad`
    a parameter that is cut              the same; what the CPU updates of it goes to its slots at
                                         `step()`
    a row that has a gradient already    the new one is added: on the device, to what comes back
                                         from the slot, or to the real `.grad`
    one of several parts of a backward, after an earlier gradient: see `parts`

This runs on the thread that launches the GPU's work, which must stay ahead of it: a node's rows are
handled at once where they are alike, and what can wait for the graph's end does (`shown`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.gradients.ahead import EarlierGradients
from hytrain_fx.gradients.at_hand import GradientsAtHand
from hytrain_fx.gradients.noted import Noted
from hytrain_fx.gradients.parts import BackwardParts
from hytrain_fx.gradients.rows import Part, RowGroup, RowGroups, like_parameter, require_strided
from hytrain_fx.gradients.shards import GradientShards
from hytrain_fx.gradients.sources import RowGradient, is_clean, is_gone
from hytrain_fx.gradients.standin import GradStandIn
from hytrain_fx.gradients.undo import BeforeBackward
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.torch_private.autograd import running_backward
from hytrain_fx.torch_private.names import private_function
from hytrain_fx.torch_private.tensors import get_grad, set_grad, without_torch_function

_foreach_add_: Final = private_function("_foreach_add_")


class SessionGradients(GradientsAtHand):
    """Takes, adds up, keeps and hands over the gradients of one session, by row."""

    def __init__(self, table: ParameterTable, engine: Engine, states: StateStore, shards: GradientShards | None = None) -> None:
        super().__init__(table, engine, states, shards)
        self.groups = RowGroups(table, states.copies)
        self.parts = BackwardParts(self.end_sums)
        self.on_sent: Callable[[Sequence[int]], None] = _nobody_waits  # with rows whose gradients are on their way to their slots
        self.on_eager_parts: Callable[[Sequence[int]], None] = _nobody_waits  # with rows that have had them, of which nobody was told
        self._earlier = EarlierGradients(self.slots, self.groups, self.parts)
        self._before = BeforeBackward()

    # ---- around a backward ----

    def forget_fresh(self) -> None:
        """A graph begins."""
        self.shown.fresh.clear()
        self._summed.clear()

    def fetching_ahead(self, calls: Sequence[tuple[int, ...]]) -> AbstractContextManager[None]:
        """Around a graph that takes the gradients of these rows, call by call.

        Earlier ones come back ahead of the call.
        """
        return nullcontext() if self.shown.shows_later else self._earlier.ahead(calls)

    @contextmanager
    def all_or_none(self, rows: Collection[int]) -> Iterator[None]:
        """Around one run of a graph that takes the gradients of `rows`.

        Where it ends in an error, `.grad` is as before the backward.
        """
        if self._before.graph_begins(running_backward()):
            self._backward_begins()
        with without_torch_function():
            self.shown.begin(map(self.table.parameters.__getitem__, rows))
        try:
            yield
            with whole(), without_torch_function():
                self._show()
        except BaseException:
            with whole(), without_torch_function():
                self._show()
                for row in rows:
                    self._undo(row)
            raise

    def _backward_begins(self) -> None:
        """Autograd adds to earlier gradients untold where a graph hands on a view of a weight."""
        with without_torch_function():
            added = [row for row, grad in self.bring_moved() if grad.grad_state.added]
        if added:
            self.parts.several.update(added)
            self.on_eager_parts(added)

    def _undo(self, row: int) -> None:
        parameter, had = self.table.parameters[row], self._before.had(row)
        if row in self.parts.open:
            self.parts.drop(row)
        elif self._before.had_none(row):
            set_grad(parameter, None)
            self._engine.discard(self._states.pieces.of(row))
            self.slots.taken.add(row)
        elif had is not None and not had.is_as_before(get_grad(parameter), self.slots.generation[row]):
            self._engine.discard(self._states.pieces.of(row))
            self.slots.gone.add(row)  # it cannot be had back: whoever asks for it is told
            set_grad(parameter, GradStandIn(parameter, RowGradient(self.slots, row, None)))

    def end_sums(self) -> None:
        """Add what came in a backward that has ended to the gradients that were there before it."""
        with torch.no_grad(), without_torch_function():
            for row, of in self.parts.close().items():
                if of.eager is not None:
                    of.graphs.add_(self.real(row, of.eager))
                self.take_late([row], [of.graphs])

    # ---- gradients of eager code ----

    def is_eager(self, row: int) -> bool:
        """As that of `GradientsAtHand`. What a sum is to be added to has been told of."""
        aside = self.parts.open.get(row)
        with without_torch_function():
            return (aside is None or get_grad(aside.parameter) is not aside.before) and super().is_eager(row)

    def offload_eager(self, row: int) -> None:
        """Offload the `.grad` that autograd has just made of a row, for a stand-in.

        One that the update reads on the device stays there. So does one of another form than the
        parameter's (sparse, of another dtype, part of a graph).
        """
        with torch.no_grad(), without_torch_function():
            parameter = self.table.parameters[row]
            grad, group = get_grad(parameter), self.groups[[row]]
            group.place(self._states)
            if not group.on_host or type(grad) is not torch.Tensor or grad.requires_grad or not group.fits([grad]):
                return
            set_grad(parameter, None)
            self.take_late([row], [grad])
            del self.shown.fresh[row]  # autograd has told of this one

    # ---- taking gradients ----

    def take(self, group: RowGroup, grads: Sequence[torch.Tensor]) -> None:
        """The gradients of one node, in the parameters' shapes.

        Their buffers die after this call.
        """
        with without_torch_function():
            fits, grads = group.laid_out(grads)
            if fits and self.shown.shows_later and not self.parts.open:
                self._take_first(group, grads)
                return
            self._show()
            again = self.parts.arrive(group.rows)
            held = list(map(get_grad, group.parameters))
            self._before.note(group.rows, held, again, self.slots.generation)
            alike = fits and not self.parts.open
            if alike and not self._earlier.to_come and all(grad is None for grad in held):
                self._take_first(group, grads)
                self.shown.end()
                return
            with torch.no_grad():
                self._take_more(group, grads, held, alike, again)
                self._earlier.go_ahead()  # in the memory of what has just been added to

    def _take_first(self, group: RowGroup, grads: Sequence[torch.Tensor]) -> None:
        """Gradients in the parameters' form, of rows that have none."""
        self.shown.take(group, grads)
        if group.on_host:
            self.on_sent(group.on_host.rows)

    def _show(self) -> None:
        """Let `.grad` show what came of rows that had none when the graph began."""
        for group in self.shown.end():
            again = self.parts.arrive(group.rows)
            self._before.note(group.rows, (None,) * len(group.rows), again, self.slots.generation)

    def _take_more(
        self, group: RowGroup, grads: Sequence[torch.Tensor], held: Sequence[torch.Tensor | None], alike: bool, again: Collection[int]
    ) -> None:
        """The gradients of rows that may have some.

        `alike`: they are in the parameters' form, and all may go in one.
        """
        earlier = self._earlier.of(group, held, again)
        if not (alike and self._take_next(group, grads, held, earlier, again)):
            self._take_each(group, grads, earlier, again)

    def take_late(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Gradients that come after the nodes of their rows, or of rows without nodes.

        Called `without_torch_function` and without gradients.
        """
        group = self.groups[rows]
        group.place(self._states)
        self._take_each(group, grads, {}, rows)
        for row in rows:
            self.shown.own.pop(row, None)  # the events that the nodes have recorded do not cover it
        self._arm_late(*group.on_host.rows)

    def _take_next(
        self,
        group: RowGroup,
        grads: Sequence[torch.Tensor],
        held: Sequence[torch.Tensor | None],
        earlier: Mapping[int, torch.Tensor],
        again: Collection[int],
    ) -> bool:
        """Gradients in the parameters' form, of rows that all have one, unedited.

        It is where the plan has it: in the slot, or on the device.

        False, with nothing done, where that is not so of a row, or where a part has to wait for the
        end of the backward.
        """
        if any(row not in earlier for row in group.on_host.rows):
            return False
        real: dict[int, torch.Tensor] = {}
        for i in group.on_device.positions:
            row = group.rows[i]
            grad = self.untouched(row, held[i])
            if grad is None or not self.parts.adds_at_once(row, again):
                return False
            real[row] = grad
        if real:
            _foreach_add_(list(real.values()), group.on_device.of(grads))
            self.shown.own.update((row, Noted.now(grad)) for row, grad in real.items())
        if group.on_host:
            sums = [earlier[row] for row in group.on_host.rows]
            _foreach_add_(sums, group.on_host.of(grads))
            self._send(group.on_host, sums)
        return True

    def _take_each(
        self, group: RowGroup, grads: Sequence[torch.Tensor], earlier: Mapping[int, torch.Tensor], again: Collection[int]
    ) -> None:
        """Gradients of any form, added to what the rows have.

        `earlier`: what has been brought from slots. `again`: rows whose `.grad` is of this
        backward.
        """
        new: list[int] = []
        given = list(grads)
        for i, row in enumerate(group.rows):
            require_strided(given[i], self.table.names[row])
            if row not in again and self._laid_aside(row, given[i]):
                continue
            given[i], is_new = self._add(row, given[i], earlier.get(row))
            if is_new:
                new.append(i)
        on_device = group.part([i for i in new if i in group.on_device.positions])
        if on_device:
            self.shown.on_device(on_device, self.shown.copies(on_device, on_device.of(given)))
        on_host = group.part([i for i in new if i in group.on_host.positions])
        if on_host:
            laid_out = [like_parameter(g, p, copy=False) for g, p in zip(on_host.of(given), on_host.homes, strict=True)]
            self._send(on_host, laid_out)

    def _laid_aside(self, row: int, grad: torch.Tensor) -> bool:
        """Whether this part waits for the end of the backward.

        `.grad` is of an earlier one then, and more parts may come.
        """
        parameter = self.table.parameters[row]
        held = parameter.grad
        if held is None or not self.parts.may_get_more(row) or (isinstance(held, GradStandIn) and is_gone(held)):
            return False
        self.parts.lay_aside(row, parameter, held, like_parameter(grad, self.table.homes[row], copy=True))
        return True

    def _add(self, row: int, grad: torch.Tensor, earlier: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
        """Add a gradient to a real `.grad`, or to the one in the slot.

        Returns the sum, and whether it has to be put somewhere.
        """
        parameter = self.table.parameters[row]
        if row in self.parts.open:
            self.parts.open[row].graphs.add_(grad)
            return grad, False
        held = parameter.grad
        if isinstance(held, GradStandIn):
            if is_gone(held):
                return grad, False  # put back by hand, so the sum cannot be known: `.grad` stays what says so to whoever asks
            if is_clean(held):
                return (held.grad_state.source.home() if earlier is None else earlier).add_(grad), True
        if held is None:
            return grad, True
        if row in self.table.shards:
            return self.real(row, held).add_(grad), True
        if isinstance(held, GradStandIn):
            held = parameter.grad = held.grad_state.materialize()
        ours = self.is_untouched(row, held)
        held.add_(grad)
        (self.shown.own if ours else self._summed)[row] = Noted.now(held)
        return grad, False

    def _send(self, part: Part, grads: Sequence[torch.Tensor]) -> None:
        """Gradients in the parameters' form to their slots, stand-ins into `.grad`.

        Called `without_torch_function`.
        """
        norms = self.shown.norms_of(part, grads)
        self.slots.send(part.rows, grads)
        self.shown.in_slots(part, norms)
        self.on_sent(part.rows)


def _nobody_waits(rows: Sequence[int]) -> None:
    return None
