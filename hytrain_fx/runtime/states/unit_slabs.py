"""Host memory of rows, by unit.

A slab for the states of the rows that came to the host together, and one for their slots.

The two are separate, so that a row changes between CPU and STREAM without moving. The slots of a
unit stand one after the other in order of the parameters, so its gradients go there in one copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from hytrain_fx.errors import EngineError, HytrainWarning
from hytrain_fx.ir.plan import Piece, Placement
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.states.row_form import RowForm
from hytrain_fx.runtime.states.slabs import HostSlab, pin_slabs


@dataclass(slots=True)
class UnitSlabs:
    """The slabs of one store of states.

    device, workers   pages are made by so many threads and pinned for this device
    form_of           what a row takes
    place_of          the unit of a row's parameter, and its piece: the order of rows
    states            by row: of states
    """

    device: torch.device
    workers: int
    form_of: Callable[[int], RowForm]
    place_of: Callable[[int], tuple[int, Piece]]
    states: dict[int, HostSlab] = field(default_factory=dict)
    # by unit: the rows that have slots
    _slot_rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _slots: dict[int, HostSlab] = field(default_factory=dict)  # by unit
    _told: list[bool] = field(default_factory=list)  # that memory is not pinned

    def copy(self) -> UnitSlabs:
        """The present slabs, to go back to."""
        return replace(self, states=self.states.copy(), _slot_rows=self._slot_rows.copy(), _slots=self._slots.copy())

    @property
    def all(self) -> list[HostSlab]:
        """Each once."""
        return list({id(slab): slab for slab in (*self.states.values(), *self._slots.values())}.values())

    def allocate(self, rows: Iterable[int]) -> dict[int, RowStates]:
        """States of these rows on the host, without slots. Raises HostMemoryError.

        Memory that cannot be pinned is used as it is, and a warning says so once.
        """
        made: dict[int, RowStates] = {}
        slabs: list[HostSlab] = []
        for of_unit in self.by_unit(rows).values():
            forms = list(map(self.form_of, of_unit))
            slab = HostSlab(sum(form.slab_bytes for form in forms))
            slabs.append(slab)
            for row, form in zip(of_unit, forms, strict=True):
                made[row] = form.on_host(slab)
                self.states[row] = slab
        self._pin(slabs)
        return {row: replace(states, pinned=self.states[row].unpinned is None) for row, states in made.items()}

    def arrange_slots(self, rows: Iterable[int], placement: Mapping[int, Placement], states: dict[int, RowStates]) -> list[int]:
        """Give the units of `rows` slots for their rows on the CPU.

        Returns the rows that have a new slot; `states` say so.

        Raises as `allocate` does, before anything is changed, and EngineError where a row is to be
        streamed whose states could not be pinned.
        """
        rows = set(rows)
        for row in rows:
            if placement.get(row) is Placement.STREAM and (why := self.states[row].unpinned) is not None:
                raise EngineError(f"states that are not pinned cannot be streamed: {why}; use stream=0")
        wanted = self._slotted(rows, placement)
        changed = self._changed(wanted)
        slabs = {unit: HostSlab(sum(self.form_of(row).slot_bytes for row in of_unit)) for unit, of_unit in changed.items() if of_unit}
        self._pin(list(slabs.values()))
        self._slot_rows |= changed
        for row in rows.intersection(states) - {row for of_unit in wanted.values() for row in of_unit}:
            states[row] = replace(states[row], slot=None, out=None)
        for unit, of_unit in changed.items():
            self._slots.pop(unit, None)
            if of_unit:
                self._hand_out(slabs[unit], of_unit, states)
        self._slots |= slabs
        return [row for of_unit in changed.values() for row in of_unit]

    def slots_of(self, rows: Iterable[int], placement: Mapping[int, Placement]) -> tuple[int, int]:
        """Bytes of the slots that `arrange_slots` makes, and of those that it then gives back."""
        changed = self._changed(self._slotted(rows, placement))
        made = sum(self.form_of(row).slot_bytes for of_unit in changed.values() for row in of_unit)
        return made, sum(self._slots[unit].nbytes for unit in changed if unit in self._slots)

    def _slotted(self, rows: Iterable[int], placement: Mapping[int, Placement]) -> dict[int, tuple[int, ...]]:
        """By unit of `rows`: its rows that are to have slots."""
        slotted = self.by_unit(row for row, place in placement.items() if place.updates_on_cpu)
        return {unit: tuple(slotted.get(unit, ())) for unit in self.by_unit(rows)}

    def _changed(self, wanted: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        return {unit: of_unit for unit, of_unit in wanted.items() if of_unit != self._slot_rows.get(unit, ())}

    def _pin(self, slabs: Sequence[HostSlab]) -> None:
        pin_slabs(slabs, self.device, self.workers)
        unpinned = [slab for slab in slabs if slab.unpinned is not None]
        if unpinned and not self._told:
            self._told.append(True)
            warnings.warn(f"{unpinned[0].unpinned}. It is used unpinned: copies from and to it hold up the thread that asks for them, and "
                          "no states are streamed. explain() says how much of the host's memory is pinned", HytrainWarning, stacklevel=2)

    def _hand_out(self, slab: HostSlab, rows: Sequence[int], states: dict[int, RowStates]) -> None:
        for row in rows:
            form = self.form_of(row)
            states[row] = replace(states[row], slot=slab.take(form.numel, form.slot_dtype))
        for row in rows:  # after the slots, which stay neighbours
            if (form := self.form_of(row)).has_out:
                states[row] = replace(states[row], out=slab.take(form.numel, form.dtype))

    def by_unit(self, rows: Iterable[int]) -> dict[int, list[int]]:
        """Rows by unit, in order of the parameters and of their ranges."""
        by_unit: dict[int, list[int]] = {}
        for (unit, _), row in sorted((self.place_of(row), row) for row in rows):
            by_unit.setdefault(unit, []).append(row)
        return by_unit
