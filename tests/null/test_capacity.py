"""The largest model and the largest batch that fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.errors import ConfigError
from hytrain_fx.forecast.capacity import WAYS, capacities, fits
from hytrain_fx.forecast.memory import footprint
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.shapes import ModelShape, read_shape

SHAPE = read_shape("llama-1.3b")
H200 = find_device("h200")
GB = st.integers(4, 200).map(lambda gb: gb * 10**9)


@given(device_bytes=GB, host_bytes=GB, recompute=st.booleans())
@settings(deadline=None, max_examples=25)
def test_one_more_does_not_fit(device_bytes: int, host_bytes: int, recompute: bool) -> None:
    """What is found fits, and one more layer or sequence does not; where nothing fits it is 0."""
    device = replace(H200, memory_bytes=device_bytes, host_memory_bytes=host_bytes)
    for found in capacities(SHAPE, device, 4096, 2048, recompute):
        assert found.layers is not None
        assert not found.layers or fits(found.way, SHAPE.with_layers(found.layers), device, 4096, recompute)
        assert not fits(found.way, SHAPE.with_layers(found.layers + 1), device, 4096, recompute)
        assert not found.tokens or fits(found.way, SHAPE, device, found.tokens, recompute)
        assert not fits(found.way, SHAPE, device, found.tokens + 2048, recompute)


@given(device_bytes=GB, host_bytes=GB, tokens=st.integers(1, 20_000))
@settings(deadline=None, max_examples=40)
def test_a_split_fits_where_some_number_of_units_does(device_bytes: int, host_bytes: int, tokens: int) -> None:
    """The single split that is tried fits whenever any number of leading units does."""
    device = replace(H200, memory_bytes=device_bytes, host_memory_bytes=host_bytes)
    some = any(footprint(SHAPE, tokens, k).fits(device) for k in range(len(SHAPE.units) + 1))
    assert fits("split", SHAPE, device, tokens, False) == some


def test_splitting_holds_the_most() -> None:
    """On the H200 machine a split holds more than either memory alone.

    Streaming saves the host's slots.
    """
    by_way = {found.way: found for found in capacities(read_shape("llama-10b"), H200, 8192, 2048, False)}
    assert list(by_way) == list(WAYS)
    layers = {way: found.layers or 0 for way, found in by_way.items()}
    assert max(layers["device"], layers["host"]) < layers["split"] <= layers["streamed"]
    assert by_way["device"].tokens == 0
    assert by_way["split"].tokens >= 8192


def test_more_layers() -> None:
    """Layers are repeated, and their names count on.

    A model that repeats none has no larger sibling.
    """
    larger = SHAPE.with_layers(30)
    assert SHAPE.layers == 24
    assert [u.name for u in larger.units[-3:]] == ["layer.28", "layer.29", "head"]
    assert [u.index for u in larger.units] == list(range(32))
    assert larger.params - SHAPE.params == 6 * SHAPE.units[1].params
    assert SHAPE.with_layers(24) == SHAPE
    single = ModelShape("single", (SHAPE.units[0], *(replace(SHAPE.units[1], index=1) for _ in range(1))), 128, 100)
    assert single.layers == 0
    assert capacities(single, H200, 128, 128, False)[0].layers is None
    with pytest.raises(ConfigError, match="found 2 layers for 'single'"):
        single.with_layers(2)
    with pytest.raises(ConfigError, match="found 0 layers"):
        SHAPE.with_layers(0)
