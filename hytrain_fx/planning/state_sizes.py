"""What states and gradients take, on each side and a parameter: the planner's arithmetic of memory, for the model that runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.states.store import StateStore


class StateSizes:
    """Of all rows of one model, wherever their states rest."""

    def __init__(self, parameters: Sequence[nn.Parameter], states: StateStore) -> None:
        self._parameters = parameters
        self._states = states
        self._rows = range(len(parameters))
        self._numel = sum(parameter.numel() for parameter in parameters)

    def device_bytes_per_param(self) -> float:
        """States, and the gradient that stays on the device until its update has run."""
        return (self._states.device_bytes(self._rows) + self._grad_bytes(self._rows)) / self._numel

    def host_bytes_per_param(self) -> float:
        """States on the host and new weights beside them, without slots except for what gradients do not fill of them."""
        apart = sum(map(self._states.out_bytes, self._rows))
        return (self._states.host_bytes(self._rows, Placement.STREAM) + apart + self.wider_bytes()) / self._numel

    def wider_bytes(self) -> int:
        """By how much gradients of rows with 16-bit copies are larger in a slot or on the device than on their way."""
        return self._grad_bytes(self._rows) - sum(map(self._states.travelling_bytes, self._rows))

    def resident_device_bytes(self) -> int:
        """Device memory that states, and gradients that stay there until their update, take already."""
        on_device = self._placed(Placement.GPU)
        return self._states.device_bytes(on_device) + self._grad_bytes([*on_device, *self._placed(Placement.STREAM)])

    def resident_host_bytes(self) -> int:
        """Host memory that states, with their slots, take already."""
        return sum(self._states.host_bytes(self._placed(place), place) for place in (Placement.CPU, Placement.STREAM))

    def moved_bytes(self, before: Sequence[Placement], after: Sequence[Placement]) -> int:
        """Bytes of states that change sides; between CPU and STREAM they stay where they are."""
        rows = [row for row in self._rows if (before[row] is Placement.GPU) != (after[row] is Placement.GPU)]
        return self._states.host_bytes(rows, Placement.STREAM)

    def _placed(self, place: Placement) -> list[int]:
        return [row for row, at in enumerate(self._states.placement) if at is place]

    def _grad_bytes(self, rows: Sequence[int]) -> int:
        return sum(self._parameters[row].numel() * self._parameters[row].element_size() for row in rows)
