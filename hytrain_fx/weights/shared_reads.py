"""Sharded weights that the loop looks at: all ranks gather them, as they have told each other.

The loop reads on every rank, or on none: one rank alone can gather nothing. What was gathered for
the loop stays, and may be read on one rank alone, until the next training forward or its update.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.errors import RankError, UnsupportedError
from hytrain_fx.runtime.native.storage_memory import put_memory
from hytrain_fx.runtime.states.pieces import flat_alias
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.torch_private.tensors import without_torch_function
from hytrain_fx.weights.gathered_units import GatheredUnits
from hytrain_fx.weights.returning import ReservedMemory
from hytrain_fx.weights.shard_homes import ShardHomes


class SharedReads:
    """Those of one session.

    units          as graphs read them
    homes          where this rank's shards rest
    reserved       memory that was taken for them
    is_elsewhere   whether the calling thread is another one than the loop's
    """

    def __init__(
        self, table: ParameterTable, states: StateStore, units: GatheredUnits, reserved: ReservedMemory, is_elsewhere: Callable[[], bool]
    ) -> None:
        self._table = table
        self._of = states.streamed
        self._states = states
        self.units = units
        self.homes = ShardHomes(table, states)
        self._reserved = reserved
        self._is_elsewhere = is_elsewhere
        self._pid = os.getpid()

    def fill(self, rows: Iterable[int]) -> list[int]:
        """Have these parameters show their whole weights, in memory of their own.

        Gives those that did not. Raises RankError where another rank does not ask for the same,
        UnsupportedError in another thread or process.
        """
        wanted = sorted({row for row in rows if row in self._of and not self.units.is_whole(row)})
        if not wanted:
            return []
        self.require_loop()
        behind = [row for row in wanted if not self._of[row].shows]
        with torch.no_grad(), without_torch_function(), self.units.lock:
            try:
                self.units.gathered.agree("weights that the loop reads", tuple(self._table.names[row] for row in wanted))
                for row in wanted:
                    self.units.end_updates(row)
                    self._fill(row)
            except RankError:
                for row in behind:  # who reads on finds no memory of another kind
                    self.fill_own(row)
                raise
            self.units.whole.update(wanted)
            if self._table.device.type == "cuda":
                torch.cuda.current_stream(self._table.device).synchronize()  # any stream may read it at once
        return behind

    def _fill(self, row: int) -> None:
        of, parameter = self._of[row], self._table.parameters[row]
        if of.has_memory and not of.current:
            self.units.gathered.bring((row,), [flat_alias(parameter.detach())])
        else:
            memory = self._reserved.memory(row, self.units.nbytes(row))
            self.units.gathered.bring((row,), [memory.view(torch.bfloat16)])
            if not of.has_memory:  # else it shows the weight, or what the loop has written there
                put_memory(parameter, memory, 0, memory.nbytes)
        of.has_memory = of.current = True

    def on_host(self, row: int) -> torch.Tensor:
        """The whole weight, flat on the CPU. The device has it only meanwhile.

        Raises as `fill`.
        """
        self.require_loop()
        with torch.no_grad(), without_torch_function(), self.units.lock:
            self.units.gathered.agree("weights that the loop reads", (self._table.names[row],))
            self.units.end_updates(row)
            memory = torch.empty(self.units.nbytes(row), dtype=torch.uint8, device=self._table.device).view(torch.bfloat16)
            self.units.gathered.bring((row,), [memory])
            return memory.cpu()

    def fill_own(self, row: int) -> None:
        """Give a parameter memory with this rank's shard of its weight; the rest is NaN.

        No other rank has to come.
        """
        of, parameter, shard = self._of[row], self._table.parameters[row], self._table.shards[row]
        if not of.has_memory:
            memory = self._reserved.memory(row, self.units.nbytes(row))
            put_memory(parameter, memory, 0, memory.nbytes)
        whole = flat_alias(parameter.detach())
        whole.fill_(torch.nan)
        whole[shard.begin : shard.end].copy_(self._states.home(row))
        of.has_memory, of.current = True, False

    def held(self, rows: Iterable[int]) -> set[int]:
        """What code of any rank holds of sharded rows. Raises RankError."""
        return self.units.gathered.on_any("weights that code outside the model holds", set(rows))

    def require_loop(self) -> None:
        """Raises UnsupportedError in another thread than the loop's, and in a forked child."""
        if os.getpid() != self._pid or self._is_elsewhere():
            raise UnsupportedError('another thread than the loop\'s, or a forked process, reads a weight with weights="sharded": all ranks '
                                   "would have to gather it there. Read it in the loop on every rank and hand over a copy, or use "
                                   'weights="resident"')
