"""Where `weights="auto"` has weights rest, and the bytes that this was decided from.

    room         what the model may take of the device
    needs        what it takes there with every weight, as far as that is known when it is compiled
    reserve      a share of the room for what is known once a step has run: activations, gradients
                 of several backwards, what lies between pieces

They rest on the device where needs and reserve fit the room. Else they are streamed, where they can
be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from hytrain_fx.ir.figures import bytes_text

RESERVE_SHARE: Final = 0.4
"""Of the device. Llama 7B's layers with 16384 tokens and recomputed activations take 6 to 10 GB
beside weights, and 0.4 of a GPU of 24 GB is 9.6: larger batches make themselves felt
as an error, smaller ones stream weights that would have fitted, which costs 1 to 3% of a step."""


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """Bytes of the device that are known when a model is compiled.

    weights_bytes     parameters and buffers, all of them there
    streamed_bytes    of these the weights that may rest on the host
    slots_bytes       what those would pass through
    states_bytes      optimizer states that the options put there, and the gradients of these
    ring_bytes        gradients on their way to the host, and staging of streamed states
    """

    weights_bytes: int
    streamed_bytes: int
    slots_bytes: int
    states_bytes: int
    ring_bytes: int

    @property
    def resident_bytes(self) -> int:
        """With every weight on the device."""
        return self.weights_bytes + self.states_bytes + self.ring_bytes

    @property
    def streamed_away_bytes(self) -> int:
        """With weights on the host that may rest there."""
        return self.resident_bytes - self.streamed_bytes + self.slots_bytes


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """What was decided.

    room_bytes   what the model may take of the device; inf for a CPU
    hindrance    why weights that do not fit are not streamed; None where they are, or fit
    """

    needs: DeviceNeeds
    room_bytes: float
    hindrance: str | None = None

    @property
    def reserve_bytes(self) -> float:
        """For activations and what else is not known."""
        return RESERVE_SHARE * self.room_bytes

    @property
    def fits(self) -> bool:
        """Whether every weight may rest on the device."""
        return math.isinf(self.room_bytes) or self.needs.resident_bytes + self.reserve_bytes <= self.room_bytes

    @property
    def place(self) -> Literal["resident", "streamed"]:
        """Where weights rest."""
        return "resident" if self.fits or self.hindrance else "streamed"

    def __str__(self) -> str:
        needs = self.needs
        weights = bytes_text(needs.weights_bytes)
        if math.isinf(self.room_bytes):
            return f'weights="auto": resident, {weights}: the model is on the CPU, where nothing is gained otherwise'
        states = f", states {bytes_text(needs.states_bytes)}" if needs.states_bytes else ""
        sums = (f"weights {weights}, ring {bytes_text(needs.ring_bytes)}{states}, and {bytes_text(self.reserve_bytes)} kept for "
                f"activations; the device has {bytes_text(self.room_bytes)} for this model")
        if self.fits:
            return f'weights="auto": resident, as they fit: {sums}'
        if self.hindrance:
            return f'weights="auto": resident, though they may not fit: {sums}. They are not streamed: {self.hindrance}'
        return (f'weights="auto": streamed, as they do not fit: {sums}. So {bytes_text(needs.streamed_bytes)} of them rest on the host, '
                f"and the device has {bytes_text(needs.slots_bytes)} of slots for these")
