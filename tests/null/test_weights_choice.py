"""Where weights="auto" has weights rest, from bytes alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hytrain_fx.ir.weights_choice import RESERVE_SHARE, DeviceNeeds, WeightsChoice

NEEDS = DeviceNeeds(weights_bytes=12_000, streamed_bytes=11_000, slots_bytes=900, states_bytes=0, ring_bytes=600)


def test_weights_rest_on_the_device_as_long_as_they_fit_beside_the_reserve() -> None:
    """The last byte decides: with one less room they are streamed."""
    enough = math.ceil(NEEDS.resident_bytes / (1 - RESERVE_SHARE))
    assert WeightsChoice(NEEDS, enough).place == "resident"
    assert WeightsChoice(NEEDS, enough - 1).place == "streamed"
    assert WeightsChoice(replace(NEEDS, states_bytes=10), enough).place == "streamed"
    assert WeightsChoice(replace(NEEDS, ring_bytes=610), enough).place == "streamed"


def test_what_cannot_be_streamed_stays_and_says_why() -> None:
    """It may not fit then."""
    choice = WeightsChoice(NEEDS, 10_000, "that is for the native engine")
    assert choice.place == "resident"
    assert str(choice) == ('weights="auto": resident, though they may not fit: weights 12 kB, ring 600 B, and 4 kB kept for activations; '
                           "the device has 10 kB for this model. They are not streamed: that is for the native engine")


@pytest.mark.parametrize(("room_bytes", "words"), [
    (10_000, "streamed, as they do not fit: weights 12 kB, ring 600 B, and 4 kB kept for activations; the device has 10 kB for this "
             "model. So 11 kB of them rest on the host, and the device has 900 B of slots for these"),
    (100_000, "resident, as they fit: weights 12 kB, ring 600 B, and 40 kB kept for activations; the device has 100 kB for this model"),
    (math.inf, "resident, 12 kB: the model is on the CPU, where nothing is gained otherwise"),
])
def test_the_choice_prints_with_its_numbers(room_bytes: float, words: str) -> None:
    """Each figure that it was decided from."""
    assert str(WeightsChoice(NEEDS, room_bytes)) == f'weights="auto": {words}'
