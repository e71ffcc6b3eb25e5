"""Gradients that updates on the device still read: nobody may write to them or free them.

    step()                   the tensor is held; `.grad` shows a stand-in of it
    the row is waited for    it is let go; `.grad` goes on with what the user has
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from sys import getrefcount

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.gradients.sources import HELD_ONCE, HeldGradient, StandIns
from hytrain_fx.gradients.standin import GradStandIn
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.torch_private.tensors import get_grad, set_grad, use_count, without_torch_function
from hytrain_fx.torch_private.trace import storage_uses_reader


class HeldGradients:
    """The gradients of one session that are held, by row. True where there are any."""

    def __init__(self, table: ParameterTable, engine: Engine, states: StateStore, standins: StandIns) -> None:
        self._held: dict[int, torch.Tensor] = {}
        self._table = table
        self._engine = engine
        self._states = states
        self._standins = standins
        self._uses_of, self._alone = storage_uses_reader()

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, row: int, grad: torch.Tensor) -> None:
        """Keep `grad` until its update has run.

        Where it is the row's `.grad`, user code finds a stand-in of it there instead.
        """
        self._held[row] = grad
        parameter, rows = self._table.parameters[row], self._states.pieces.of(row)
        shown = get_grad(parameter)
        if shown is grad:
            standin = self._standins.make(row, parameter, HeldGradient(row, grad).begin(self._engine, rows))
            self._standins.lend(row, standin)
            set_grad(parameter, standin)
        elif type(shown) is GradStandIn and type(source := shown.grad_state.source) is HeldGradient and source.unread is grad:
            source.begin(self._engine, rows)

    def let_go(self, rows: Sequence[int]) -> None:
        """The updates of these rows have run."""
        with without_torch_function():
            for row in rows:
                if self._held.pop(row, None) is not None:
                    self._standins.end_loan(row)

    def kept_elsewhere(self, rows: Iterable[int]) -> list[int]:
        """Those of these rows whose gradient somebody else has, who may write to it at any time.

        Only once no item of a commit refers to it. Called `without_torch_function`.
        """
        return [row for row in rows if row in self._held and self._is_kept(row)]

    def _is_kept(self, row: int) -> bool:
        if getrefcount(self._held[row]) > HELD_ONCE + 1:  # here, and in the source of the stand-in that `.grad` shows
            return True
        tensor = self._held[row]
        return use_count(tensor) > 1 or self._uses_of(tensor) > self._alone

    def let_go_of_all(self) -> None:
        """No update is running: nothing reads the gradients that are held."""
        self.let_go(list(self._held))

    def end_update(self, row: int) -> None:
        """A gradient comes from user code.

        `step()` may have been called before without a forward after it.
        """
        rows = self._states.pieces.of(row)
        if any(map(self._engine.pending, rows)):
            self._engine.settle(rows)
            self.let_go([row])
