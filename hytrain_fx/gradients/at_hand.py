"""The gradients that `.grad` shows, as `step()` and the moves of states find them.

    in its slot, unedited        an update by the CPU takes it there
    on the device, unedited      an update there reads it
    anything else                a tensor that is offloaded, or read, at `step()`

Of a parameter that ranks update in shards, what is found here is this rank's shard.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.gradients.held import HeldGradients
from hytrain_fx.gradients.noted import Noted, is_as_noted
from hytrain_fx.gradients.rows import like_parameter, require_strided
from hytrain_fx.gradients.shards import GradientShards
from hytrain_fx.gradients.shown import ShownGradients
from hytrain_fx.gradients.slots import GradientSlots
from hytrain_fx.gradients.sources import RowGradient, in_slot_at_all, is_in_slot, is_moved, shard_on_device
from hytrain_fx.gradients.standin import GradStandIn
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.side_stream import read_here
from hytrain_fx.runtime.states.pieces import flat_memory
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.torch_private.tensors import get_grad, without_torch_function


class GradientsAtHand:
    """What became of the gradients of one session, by row.

    stay   whether those of the backward that runs stay on the device, wherever their rows are
    """

    stay = False

    def __init__(self, table: ParameterTable, engine: Engine, states: StateStore, shards: GradientShards | None) -> None:
        self.table = table
        self.slots = GradientSlots(table, engine, states, shards)
        self.shown = ShownGradients(engine, self.slots)
        self.standins = self.shown.standins
        self.held = HeldGradients(table, engine, states, self.standins)
        self._engine = engine
        self._states = states
        self._summed: dict[int, Noted] = {}  # real gradients of others that a graph has added to

    def stream_out(self) -> bool:
        """Memory is short. Gives whether gradients take less of it from now on."""
        return False

    def offload_real(self, row: int, grad: torch.Tensor) -> None:
        """Offload a real `.grad` at `step()`.

        It came from outside the graphs, or user code has changed it.
        """
        self.slots.send([row], [like_parameter(grad, self.table.homes[row], copy=False)])
        shown = get_grad(self.table.parameters[row])
        if isinstance(shown, GradStandIn) and shown.materialized is None:  # a shard: what it had is in the slot now
            shown.grad_state.source, shown.grad_state.factors = RowGradient(self.slots, row, None), ()
        self._arm_late(row)

    def offload_pieces(self, row: int, grad: torch.Tensor) -> None:
        """As `offload_real`, what the CPU updates of a parameter that is cut.

        `grad` has the parameter's order of memory.
        """
        pieces, flat = self._states.host_pieces(row), flat_memory(grad)
        rows, parts = list(pieces), [flat[piece.begin : piece.end] for piece in pieces.values()]
        self.slots.on_offload(rows, parts)
        self._engine.grad_offload(rows, parts)
        self._arm_late(*pieces)

    def is_eager(self, row: int) -> bool:
        """Whether the row's present `.grad` has a part that did not come from the graphs.

        Asked when autograd has added what it has.
        """
        state = self.shown.fresh.pop(row, None)
        if state is not None:
            return state.real is not None  # added to a stand-in, it brings the real gradient back
        with without_torch_function():
            grad = get_grad(self.table.parameters[row])
        if isinstance(grad, GradStandIn):
            return grad.materialized is not None
        return grad is not None and not (self.is_untouched(row, grad) or is_as_noted(grad, self._summed.get(row)))

    def on_device(self, row: int, grad: torch.Tensor) -> torch.Tensor:
        """A real gradient in the parameter's order of memory, for an update to read later.

        A copy of a tensor that user code made.
        """
        made = self.shown.own.get(row)
        return like_parameter(grad, self.table.homes[row], copy=made is None or not made.is_of(grad))

    def real(self, row: int, grad: torch.Tensor) -> torch.Tensor:
        """What is updated here of a gradient that was edited, or is not where its states are.

        Raises GradientConsumedError, and UnsupportedError for a sparse one.
        """
        shards = self.slots.shards_of(row)
        if isinstance(grad, GradStandIn):
            if shards is not None and grad.grad_state.source.shards is not None and grad.materialized is None:
                return grad.grad_state.copy_home()
            grad = grad.grad_state.materialize()
        require_strided(grad, self.table.names[row])
        read_here(grad)
        return grad if shards is None else shards.part(row, grad)

    def bring_moved(self) -> list[tuple[int, GradStandIn]]:
        """A gradient that user code has given to another parameter becomes a real tensor there.

        Called `without_torch_function`, before the slot that it is in gets another. Gives all
        stand-ins that `.grad` shows, by row.
        """
        standins = [(row, grad) for row, grad in enumerate(map(get_grad, self.table.parameters)) if type(grad) is GradStandIn]
        for row, grad in standins:
            if is_moved(grad, self.slots, row):
                grad.grad_state.materialize()
        return standins

    def before_move(self) -> None:
        """Slots are about to be other memory.

        What `.grad` still shows of them after `step()` is kept on the host.
        """
        with without_torch_function():
            for grad in map(get_grad, self.table.parameters):
                if isinstance(grad, GradStandIn) and (source := in_slot_at_all(grad)) is not None:
                    with suppress(torch.OutOfMemoryError, MemoryError):  # then it is gone, which is no reason to end the training here
                        grad.grad_state.source = source.kept()
        self.end()

    def end(self) -> None:
        """No slot has a gradient from now on."""
        self.held.let_go_of_all()
        self.slots.gone.update(range(len(self.table)))

    def is_untouched(self, row: int, grad: torch.Tensor) -> bool:
        """Whether this real gradient was made by the graphs and not edited since."""
        return is_as_noted(grad, self.shown.own.get(row))

    def untouched(self, row: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        """What is updated here of such a gradient: all of it, or a shard. None for others."""
        found = shard_on_device(grad) if row in self.table.shards else grad
        return found if found is not None and self.is_untouched(row, found) else None

    def any_in_place(self) -> bool:
        """Whether a gradient that `step()` may take rests where the present placement has it.

        In a slot, or ready on the device.
        """
        with without_torch_function():
            found = [(row, grad) for row, grad in enumerate(map(get_grad, self.table.parameters)) if grad is not None]
            return any((isinstance(grad, GradStandIn) and is_in_slot(grad, self.slots, row)) or self.untouched(row, grad) is not None
                       for row, grad in found)

    def _arm_late(self, *rows: int) -> None:
        self._engine.arm_cpu(rows)
        self._engine.arm_reload(rows)
