"""What optimizer states take of both memories, and whether the host holds what a move adds.

`placed.py` moves them. While it does, a unit has new slots beside its old ones: gradients may still
be on their way to those. So the host may hold the rows of one unit after the other where it does
not hold a move of all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from hytrain_fx.ir.plan import Piece, PlacedPiece, Placement
from hytrain_fx.ir.shard import Shard
from hytrain_fx.ir.states import Kernel, StateTable, StateTraffic
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.memory import available_host_bytes
from hytrain_fx.runtime.rounding import NO_PLACE, RoundingPlace
from hytrain_fx.runtime.states.copied_weights import CopiedWeights
from hytrain_fx.runtime.states.pieces import PieceRows
from hytrain_fx.runtime.states.row_form import RowForm
from hytrain_fx.runtime.states.slabs import HostSlab, require_host_memory
from hytrain_fx.runtime.states.unit_slabs import UnitSlabs
from hytrain_fx.torch_private.tensors import without_torch_function


class StateBytes:
    """The rows and their memory.

    weights   the parameters' own tensors, by number
    unit_of   unit of each parameter: the rows of a unit share one slab
    tables    by parameter: the states that it has
    names     of the parameters, for messages
    shards    by number of a parameter that ranks update in shards: this rank's
    origins   by parameter: where its first element here is, for rounding by chance

    pieces       the rows of each parameter
    placement    by row that is in use
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        unit_of: Sequence[int],
        tables: Sequence[StateTable],
        engine: Engine,
        names: Sequence[str] = (),
        shards: Mapping[int, Shard] = MappingProxyType({}),
        origins: Sequence[RoundingPlace] = (),
    ) -> None:
        self._weights = list(weights)
        self.copies = CopiedWeights()
        self.pieces = PieceRows(weights, names or [""] * len(self._weights), unit_of, engine, shards)
        self.placement: dict[int, Placement] = dict.fromkeys(range(len(self._weights)), Placement.CPU)
        self._tables = tuple(tables)
        self._origins = origins or [NO_PLACE] * len(self._weights)
        self._engine = engine
        self._unit_of = tuple(unit_of)
        self._slabs = UnitSlabs(self._weights[0].device, engine.workers, self._form, self._place_of)

    # ---- what rows take ----

    def table(self, parameter: int) -> StateTable:
        """The states that it has."""
        return self._tables[parameter]

    @property
    def slabs(self) -> list[HostSlab]:
        """All host memory that states and slots take."""
        return self._slabs.all

    def host_bytes(self, rows: Iterable[int], place: Placement = Placement.CPU) -> int:
        """Bytes of host memory that the states of these rows take under `place`.

        For CPU their slots are included.
        """
        return sum(_host_bytes(self._form(row), place) for row in rows)

    def host_bytes_of(self, placed: Iterable[PlacedPiece]) -> int:
        """Bytes of host memory that states take where these pieces rest."""
        return sum(_host_bytes(self.form_of(of.piece), of.placement) for of in placed)

    def device_bytes(self, rows: Iterable[int]) -> int:
        """Bytes of device memory the states of these rows take there.

        Fp32 weights are their own masters.
        """
        return sum(self._form(row).device_bytes for row in rows)

    def travelling_bytes(self, row: int) -> int:
        """Bytes of a row's gradient on its way to the host, and of its new weight on its way back.

        Usually, that is: a row with a copy may send an fp32 gradient.
        """
        form = self._form(row)
        return form.numel * form.dtype.itemsize

    def traffic(self, rows: Sequence[int]) -> StateTraffic:
        """What updates of these rows move of their states."""
        forms = list(map(self._form, rows))
        params = max(sum(form.numel for form in forms), 1)
        return StateTraffic(sum(form.table_bytes for form in forms) / params, all(form.table.tie is not None for form in forms))

    @property
    def of_other_optimizer(self) -> bool:
        """Whether they are of an optimizer without a kernel."""
        return any(table.kernel is Kernel.NONE for table in self._tables)

    @property
    def may_halve(self) -> bool:
        """Whether masters of bf16 weights may be in halves.

        They may if each parameter has a state with signs to spare.
        """
        return all(table.tie is not None for table in self._tables)

    def form_of(self, piece: Piece) -> RowForm:
        """What a piece takes of memory, whether or not the parameter is cut so."""
        table, place = self._tables[piece.parameter], self._origins[piece.parameter].after(piece.begin)
        splits = table.tie is not None and self._engine.splits_masters
        with without_torch_function():  # asking a guarded parameter takes 3 us, and plans ask for all of them several times
            return RowForm(piece.numel, self._weights[piece.parameter].dtype, table, piece.parameter in self.copies, splits, place)

    def _form(self, row: int) -> RowForm:
        return self.form_of(self.pieces.piece(row))

    def _place_of(self, row: int) -> tuple[int, Piece]:
        piece = self.pieces.piece(row)
        return self._unit_of[piece.parameter], piece

    # ---- what the host holds ----

    def _in_use(self) -> int:
        """What states take of the host now.

        Slabs count whole: a part that a row has left is given back with the last row.
        """
        on_host = (row for row, place in self.placement.items() if not place.rests_on_device)
        own = sum(self._tables[self.pieces.parameter(row)].own_bytes for row in on_host) if self.of_other_optimizer else 0
        return own + sum(slab.nbytes for slab in self._slabs.all)

    def _require_all(self, placed: Sequence[PlacedPiece], limit_bytes: int | None) -> None:
        """Raise HostMemoryError where the host does not hold all states at these places.

        Where that is less than they take now, it is let through.
        """
        needed, in_use = self.host_bytes_of(placed), self._in_use()
        if needed > in_use:
            require_host_memory(needed - (in_use if limit_bytes is None else 0), limit_bytes)

    def _batches(self, rows: Sequence[int], place: Placement, limit_bytes: int | None) -> list[list[int]]:
        """The rows; those of one unit after the other where the host does not hold all at once."""
        room = available_host_bytes() if limit_bytes is None else limit_bytes - self._in_use()
        added, _ = self._added_and_freed(rows, place)
        return [list(rows)] if added <= room else list(self._slabs.by_unit(rows).values())

    def _require_room(self, rows: Collection[int], place: Placement, limit_bytes: int | None) -> None:
        """Raise HostMemoryError where the host does not hold what moving these rows adds.

        A move that gives more back than it takes is let through.
        """
        added, freed = self._added_and_freed(rows, place)
        if added > freed:
            require_host_memory(added, limit_bytes, 0 if limit_bytes is None else self._in_use())

    def _added_and_freed(self, rows: Collection[int], place: Placement) -> tuple[int, int]:
        """Bytes that a move of these rows takes, and those of slots that it then gives back."""
        coming = [] if place.rests_on_device else [row for row in rows if self.placement[row].rests_on_device]
        slots, freed = self._slabs.slots_of(rows, self.placement | dict.fromkeys(rows, place))
        return self.host_bytes(coming, Placement.STREAM) + slots, freed


def _host_bytes(form: RowForm, place: Placement) -> int:
    if place.rests_on_device:
        return 0
    return form.slab_bytes + form.table.own_bytes + (form.slot_bytes if place.updates_on_cpu else 0)
