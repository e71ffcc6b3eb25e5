"""Where this rank's shards of weights rest: on the device, or on the host beside their states.

    device    memory of their own there, wherever their states are
    host      of what the CPU updates whole: the half of its master that is the weight. It takes no
              memory, and each gather copies it to the device first. A shard whose states move to
              the device, or visit it, comes along, and goes back with them

It is a rank's own affair: the others see what is gathered, and no bit depends on it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.ir.figures import bytes_text
from hytrain_fx.ir.limits import HALF_BYTES
from hytrain_fx.ir.plan import PlacedPiece, whole_on_cpu
from hytrain_fx.runtime.states.store import StateStore


class ShardHomes:
    """Those of one session.

    on_host   whether shards rest on the host where they can
    """

    def __init__(self, table: ParameterTable, states: StateStore) -> None:
        self.on_host = False
        self._table = table
        self._states = states
        self._of = states.streamed

    def begin(self, row: int) -> None:
        """From now on the weight of an idle parameter rests as a shard, on the device."""
        self._states.shard(row)

    def settle(self) -> None:
        """Shards of idle parameters rest where they are to."""
        for row in whole_on_cpu(self._states.placed) & self._of.keys() if self.on_host else ():
            if self._of[row].shard is not None and self._states[row].low is not None:
                self._states.rest_on_host(row)

    def before_move(self, placed: Sequence[PlacedPiece]) -> None:
        """States of idle parameters are about to move there: their shards come to the device."""
        for row in self._of.keys() - whole_on_cpu(placed):
            if self._of[row].shard is None:
                self._states.rest_on_device(row)

    def nbytes(self, row: int) -> int:
        """Bytes of this rank's shard."""
        return self._table.homes[row].nbytes

    def host_params(self, rows: Collection[int]) -> int:
        """Elements of shards of these rows that rest on the host if the CPU updates them."""
        return sum(self._table.homes[row].numel() for row in rows) if self.on_host else 0

    def away_bytes(self, placed: Sequence[PlacedPiece]) -> int:
        """Bytes of sharded weights that this rank's device does not have, were states placed so."""
        on_host = whole_on_cpu(placed) if self.on_host else ()
        return sum(HALF_BYTES * self._table.shards[row].numel - (0 if row in on_host else self.nbytes(row)) for row in self._of)

    @property
    def back_bytes(self) -> int:
        """Bytes of shards that are on the device only because of where they are updated."""
        return sum(self.nbytes(row) for row, of in self._of.items() if of.shard is not None) if self.on_host else 0

    def in_words(self) -> str:
        """What this rank has, and how much of it on the host."""
        on_host = sum(self.nbytes(row) for row, of in self._of.items() if of.shard is None)
        there = f", {bytes_text(on_host)} of it on the host" if on_host else ""
        return bytes_text(sum(map(self.nbytes, self._of))) + there
