"""Where the optimizer states of every parameter rest, and moving them between host and device.

    CPU      fp32 states on the host, a slot for the gradient, and memory for a 16-bit weight that
             no half of its master is
    STREAM   fp32 states on the host, no slot: the gradient stays on the device
    GPU      fp32 states on the device

A parameter may be cut: each of its pieces is a row of the engine and rests by itself (`pieces.py`).
On the host the masters of bf16 rows are in two halves, one of them the weight, where the engine has
it so. So are those of fp32 rows that the device has in 16 bits (`copied_weights.py`): their weight
here is the copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from hytrain_fx.errors import EngineError
from hytrain_fx.ir.plan import Piece, PlacedPiece, Placement
from hytrain_fx.ir.states import Kernel
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.states.pieces import flat_memory
from hytrain_fx.runtime.states.slabs import require_host_memory
from hytrain_fx.runtime.states.split_master import FirstWeight, copy_states, load_masters, on_the_device
from hytrain_fx.runtime.states.state_bytes import StateBytes


class PlacedStates(StateBytes):
    """Master weights and states; slabs by unit, those of slots apart from those of states, so that
    rows change between CPU and STREAM where they are.

    arrangement  counts up whenever a row rests elsewhere, or a parameter is cut otherwise
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.arrangement = 0
        self._leaving: tuple[int, frozenset[int]] = (-1, frozenset())  # and the arrangement it is of
        self._states: dict[int, RowStates] = {}
        # parameters whose masters have the weight's half at home, wherever they are updated
        self._kept: set[int] = set()

    def __getitem__(self, row: int) -> RowStates:
        return self._states[row]

    def in_memory(self, row: int) -> RowStates:
        """The states, for reading or writing their values.

        Raises EngineError in a forked child that does not have them.
        """
        if row in self._slabs.states:
            self._slabs.states[row].require_here()
        return self._states[row]

    def __iter__(self) -> Iterator[tuple[int, RowStates]]:
        """The rows in use with their states, in order of the parameters."""
        return ((row, self._states[row]) for row in self._rows(range(len(self._weights))))

    # ---- of one parameter ----

    def is_whole(self, parameter: int) -> bool:
        """Whether it may not be cut.

        Its update is not elementwise, or the device has a copy of it.
        """
        return self._tables[parameter].kernel is Kernel.NONE or parameter in self.copies

    def gradient_leaves(self, parameter: int) -> bool:
        """Whether its whole gradient goes to a slot on the host."""
        return parameter not in self.pieces.cut and self.placement[parameter].updates_on_cpu

    def leaving(self) -> frozenset[int]:
        """All parameters of which `gradient_leaves` is true."""
        if self._leaving[0] != self.arrangement:
            self._leaving = self.arrangement, frozenset(filter(self.gradient_leaves, range(len(self._weights))))
        return self._leaving[1]

    def host_pieces(self, parameter: int) -> dict[int, Piece]:
        """By row: the pieces of a parameter that is cut whose updates the CPU does."""
        return {row: self.pieces.piece(row) for row in self.pieces.cut.get(parameter, ()) if self.placement[row].updates_on_cpu}

    def params_by_place(self, parameter: int) -> dict[Placement, int]:
        """How many of its elements are updated where, in the order of its memory."""
        found: dict[Placement, int] = {}
        for row in self.pieces.of(parameter):
            found[self.placement[row]] = found.get(self.placement[row], 0) + self.pieces.piece(row).numel
        return found

    # ---- where they rest ----

    @property
    def placed(self) -> tuple[PlacedPiece, ...]:
        """Every piece and its placement, in order of the parameters."""
        return tuple(PlacedPiece(self.pieces.piece(row), self.placement[row]) for row in self._rows(range(len(self._weights))))

    def allocate(self, placed: Sequence[PlacedPiece], limit_bytes: int | None, first: FirstWeight = on_the_device) -> None:
        """Allocate every piece where it is placed, states zero.

        Masters are the weights, or what `first` gives of a row. Raises HostMemoryError.
        """
        self.placement = {}
        for pieces in _by_parameter(placed).values():
            self._cut(pieces)
        rows = list(self.placement)
        self._make(rows, limit_bytes)
        load_masters((self._states[row].master, self._weight(row) if (of := first(row)) is None else of) for row in rows)
        self._tell_engine({*rows, *self._slabs.arrange_slots(rows, self.placement, self._states)})

    def move(self, placed: Sequence[PlacedPiece], limit_bytes: int | None) -> None:
        """Move the states of idle parameters to where these pieces are to rest; no bit changes.

        Raises HostMemoryError, torch.OutOfMemoryError, and EngineError where memory cannot be
        pinned. What has not been moved by then is where it was.
        """
        now, wanted = _by_parameter(self.placed), _by_parameter(placed)
        changed = {parameter: pieces for parameter, pieces in wanted.items() if now[parameter] != pieces}
        cut_otherwise = [parameter for parameter, pieces in changed.items() if _ranges(pieces) != _ranges(now[parameter])]
        rows = {row: of.placement for parameter in changed.keys() - cut_otherwise
                for row, of in zip(self.pieces.of(parameter), changed[parameter], strict=True)}
        self._require_all(placed, limit_bytes)
        # Host memory is given back before any is taken.
        self._move_rows([row for row in sorted(rows) if rows[row].rests_on_device], Placement.GPU, limit_bytes)
        slotted = [row for row in sorted(rows) if rows[row].visits_device and self.placement[row].updates_on_cpu]
        self._move_rows(slotted, Placement.STREAM, limit_bytes)
        for parameter in cut_otherwise:
            self._recut(changed[parameter], limit_bytes)
        for place in (Placement.STREAM, Placement.CPU):
            self._move_rows([row for row in sorted(rows) if rows[row] is place], place, limit_bytes)

    def _move_rows(self, rows: Sequence[int], place: Placement, limit_bytes: int | None) -> None:
        """Move rows that are elsewhere."""
        rows = [row for row in rows if self.placement[row] is not place]
        for batch in self._batches(rows, place, limit_bytes) if rows else ():
            self._require_room(batch, place, limit_bytes)
            self._move_together(batch, place)

    def _move_together(self, rows: Sequence[int], place: Placement) -> None:
        """If it raises, all are where they were."""
        for row in rows:
            self._bring_weight_home(row)
        before = {row: self._states[row] for row in rows if place.rests_on_device or self.placement[row].rests_on_device}
        with self._undone_on_error(to_tell := set(rows)):
            if not place.rests_on_device:
                self._states |= self._slabs.allocate(before)
            for row in rows:
                self.placement[row] = place
            for row, states in before.items():
                if place.rests_on_device:
                    self._states[row] = self._device_states(row)
                self._fill(row, states)
            to_tell.update(self._slabs.arrange_slots(rows, self.placement, self._states))
            self._tell_engine(to_tell)
        if place.rests_on_device:
            for row in rows:
                self._slabs.states.pop(row)  # the last row of a slab frees it

    def _recut(self, pieces: Sequence[PlacedPiece], limit_bytes: int | None) -> None:
        """Give one parameter rows for other pieces, and their states the bits that it has.

        If it raises, all is as before.
        """
        parameter = pieces[0].piece.parameter
        old = self.pieces.of(parameter)
        for row in old:
            self._bring_weight_home(row)
        before = [(self.pieces.piece(row), self._states[row]) for row in old]
        in_use = self._in_use()  # the states are copied, so the old ones stay until then
        with self._undone_on_error(to_tell := set(old)):
            for row in old:
                del self.placement[row]
            new = self._cut(pieces)
            for row in set(old) - set(new):
                self._slabs.states.pop(row, None)
                del self._states[row]
            self._make(new, limit_bytes, in_use)
            for row in new:
                self._fill_from(row, before)
            told = {*new, *self._slabs.arrange_slots({*old, *new}, self.placement, self._states)}
            to_tell.update(told)
            self._tell_engine(told)
            if self._engine.can_stream:
                for row in new:
                    self._engine.send_weight(row, parameter in self._kept)
        for row in set(old) - set(new):
            self._engine.retire(row)

    def _make(self, rows: Sequence[int], limit_bytes: int | None, in_use: int = 0) -> None:
        """Master and states of these rows where they are placed, zero, beside what is `in_use`.

        Raises HostMemoryError, EngineError, torch.OutOfMemoryError.
        """
        on_device = [row for row in rows if self.placement[row].rests_on_device]
        on_host = [row for row in rows if not self.placement[row].rests_on_device]
        slots, _ = self._slabs.slots_of(rows, self.placement)
        require_host_memory(self.host_bytes(on_host, Placement.STREAM) + slots, limit_bytes, in_use)
        self._states |= self._slabs.allocate(on_host)
        for row in on_device:
            self._states[row] = self._device_states(row)
            self._slabs.states.pop(row, None)

    def _cut(self, pieces: Sequence[PlacedPiece]) -> tuple[int, ...]:
        parameter = pieces[0].piece.parameter
        rows = self.pieces.set_cut([of.piece for of in pieces], self._weights[parameter])
        self.placement.update(zip(rows, (of.placement for of in pieces), strict=True))
        self.arrangement += 1
        return rows

    def _fill(self, row: int, states: RowStates) -> None:
        """Write what the row had into where it rests now."""
        target = self._states[row]
        if self.placement[row].rests_on_device and target.master.dtype == self._weight(row).dtype and row not in self.copies:
            # This is the weight, which has these bits already. Writing it would end the backward of
            # a forward from before the move.
            states = replace(states, master=target.master)
        copy_states(states, target, self._weight(row).device)
        if row in self.copies and self.placement[row].rests_on_device:
            self.copies[row].current = True

    def _fill_from(self, row: int, before: Iterable[tuple[Piece, RowStates]]) -> None:
        """The same from pieces that overlap it."""
        mine, target, weight = self.pieces.piece(row), self._states[row], self._weight(row)
        is_weight = target.master.data_ptr() == weight.data_ptr()
        for piece, states in before:
            begin, end = max(mine.begin, piece.begin), min(mine.end, piece.end)
            if begin >= end:
                continue
            source = states.part(begin - piece.begin, end - piece.begin)
            into = target.part(begin - mine.begin, end - mine.begin)
            if is_weight:
                source = replace(source, master=into.master)
            copy_states(source, into, weight.device)

    @contextlib.contextmanager
    def _undone_on_error(self, rows: set[int]) -> Iterator[None]:
        """Protects a move of these rows, and of rows that are added meanwhile."""
        held = (self.placement.copy(), self._states.copy(), self._slabs.copy())
        cut = self.pieces.cut.copy()
        self.arrangement += 1
        try:
            yield
        except BaseException:
            self.placement, self._states, self._slabs = held
            self.pieces.restore(cut)
            self.arrangement += 1
            with contextlib.suppress(EngineError):  # a failed engine says so at every later call
                # it may know some of the new places already
                self._tell_engine(rows & self.placement.keys())
            raise
        # Keep `held` until here: dropped gradients may still be on their way to the old slots while
        # the engine has not been told.

    def _rows(self, parameters: Iterable[int]) -> Iterator[int]:
        return (row for parameter in parameters for row in self.pieces.of(parameter))

    # ---- told and made ----

    def _leaves_weight(self, row: int) -> bool:
        """Whether the half of the master that is the weight is on the device only.

        That is 2 bytes a parameter less on the way to the host.
        """
        kept = self.pieces.parameter(row) in self._kept
        return self.placement[row].visits_device and self._states[row].low is not None and not kept

    def _bring_weight_home(self, row: int) -> None:
        if self._leaves_weight(row):
            self.in_memory(row).master.copy_(self._weight(row))

    def _tell_engine(self, rows: Iterable[int]) -> None:
        place = {Placement.CPU: self._engine.place_on_host, Placement.GPU: self._engine.place_on_device,
                 Placement.STREAM: self._engine.place_streamed}
        for row in rows:
            place[self.placement[row]](row, self._states[row])

    def _weight(self, row: int) -> torch.Tensor:
        """What the engine writes to, flat.

        For the guard of a parameter this is a touch, unless the guard is off.
        """
        piece = self.pieces.piece(row)
        return self.pieces.memory(piece.parameter, self._weights[piece.parameter])[piece.begin : piece.end]

    def _device_states(self, row: int) -> RowStates:
        weight = self._weight(row)
        if row in self.copies:
            self.copies[row].take_memory()
            weight = flat_memory(self.copies[row].weight)
        return self._form(row).on_device(weight.device, weight)


def _by_parameter(placed: Iterable[PlacedPiece]) -> Mapping[int, tuple[PlacedPiece, ...]]:
    ordered = sorted(placed)
    return {parameter: tuple(of) for parameter, of in groupby(ordered, key=lambda of: of.piece.parameter)}


def _ranges(placed: Iterable[PlacedPiece]) -> list[Piece]:
    return [of.piece for of in placed]
