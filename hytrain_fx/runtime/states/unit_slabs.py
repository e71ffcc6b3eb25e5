"""Host memory of rows, by unit.

A slab for the states of the rows that came to the host together, and one for their slots.

The two are separate, so that a row changes between CPU and STREAM without moving. The slots of a
unit stand one after the other in order of the parameters, so its gradients go there in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

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

    def copy(self) -> UnitSlabs:
        """The present slabs, to go back to."""
        return replace(self, states=self.states.copy(), _slot_rows=self._slot_rows.copy(), _slots=self._slots.copy())

    @property
    def all(self) -> list[HostSlab]:
        """Each once."""
        return list({id(slab): slab for slab in (*self.states.values(), *self._slots.values())}.values())

    def allocate(self, rows: Iterable[int]) -> dict[int, RowStates]:
        """States of these rows on the host, without slots.

        Raises HostMemoryError, EngineError where memory cannot be pinned.
        """
        made: dict[int, RowStates] = {}
        slabs: list[HostSlab] = []
        for of_unit in self._by_unit(rows).values():
            forms = list(map(self.form_of, of_unit))
            slab = HostSlab(sum(form.slab_bytes for form in forms))
            slabs.append(slab)
            for row, form in zip(of_unit, forms, strict=True):
                made[row] = form.on_host(slab)
                self.states[row] = slab
        pin_slabs(slabs, self.device, self.workers)
        return made

    def arrange_slots(self, rows: Iterable[int], placement: Mapping[int, Placement], states: dict[int, RowStates]) -> list[int]:
        """Give the units of `rows` slots for their rows on the CPU.

        Returns the rows that have a new slot; `states` say so.

        Raises as `allocate` does, before anything is changed.
        """
        rows = set(rows)
        slotted = self._by_unit(row for row, place in placement.items() if place.updates_on_cpu)
        wanted = {unit: tuple(slotted.get(unit, ())) for unit in self._by_unit(rows)}
        changed = {unit: of_unit for unit, of_unit in wanted.items() if of_unit != self._slot_rows.get(unit, ())}
        slabs = {unit: HostSlab(sum(self.form_of(row).slot_bytes for row in of_unit)) for unit, of_unit in changed.items() if of_unit}
        pin_slabs(list(slabs.values()), self.device, self.workers)
        self._slot_rows |= changed
        for row in rows.intersection(states) - {row for of_unit in wanted.values() for row in of_unit}:
            states[row] = replace(states[row], slot=None, out=None)
        for unit, of_unit in changed.items():
            self._slots.pop(unit, None)
            if of_unit:
                self._hand_out(slabs[unit], of_unit, states)
        self._slots |= slabs
        return [row for of_unit in changed.values() for row in of_unit]

    def _hand_out(self, slab: HostSlab, rows: Sequence[int], states: dict[int, RowStates]) -> None:
        for row in rows:
            form = self.form_of(row)
            states[row] = replace(states[row], slot=slab.take(form.numel, form.slot_dtype))
        for row in rows:  # after the slots, which stay neighbours
            if (form := self.form_of(row)).has_out:
                states[row] = replace(states[row], out=slab.take(form.numel, form.dtype))

    def _by_unit(self, rows: Iterable[int]) -> dict[int, list[int]]:
        """Rows by unit, in order of the parameters and of their ranges."""
        by_unit: dict[int, list[int]] = {}
        for (unit, _), row in sorted((self.place_of(row), row) for row in rows):
            by_unit.setdefault(unit, []).append(row)
        return by_unit
