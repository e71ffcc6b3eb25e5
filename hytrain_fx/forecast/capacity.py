"""The largest model and the largest batch that fit, for each way of placing the states.

They are found by bytes alone.

A larger model is the same one with more of its repeated layers; a larger batch has more sequences
of the same length. Where states are split the host takes as many units as it holds; the first ones
rest on the device.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.memory import Footprint, footprint, unit_shards
from hytrain_fx.forecast.ranks import ONE_RANK, Ranks
from hytrain_fx.forecast.shapes import ModelShape

MOST_LAYERS = 1 << 12
MOST_SEQUENCES = 1 << 20
WAYS = {
    "device": "all states on the device", "host": "all states on the host", "split": "split, the host's part updated by the CPU",
    "streamed": "split, the host's part streamed",
}


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits one way: `layers` and `params` of the largest model at this batch (None where no
    layers repeat), `tokens` in the largest micro-batch of this model. 0 = nothing fits; `layers`
    and `tokens` stop at 4096 and at 2^20 sequences.
    """

    way: str
    layers: int | None
    params: int | None
    tokens: int


def capacities(
    shape: ModelShape, device: DeviceSpec, tokens: int, sequence: int, recompute: bool, ranks: Ranks = ONE_RANK
) -> tuple[Capacity, ...]:  # fmt: skip
    """One `Capacity` for each way, in the order of `WAYS`."""
    found = []
    sized = functools.cache(shape.with_layers)  # all ways are asked for much the same
    for way in WAYS:
        def sequences_fit(count: int, way: str = way) -> bool:
            return fits(way, shape, device, count * sequence, recompute, ranks)

        def layers_fit(layers: int, way: str = way) -> bool:
            return fits(way, sized(layers), device, tokens, recompute, ranks)

        layers = most_layers(layers_fit) if shape.layers else None
        params = None if layers is None else sized(layers).params if layers else 0
        found.append(Capacity(way, layers, params, sequence * _largest(sequences_fit, MOST_SEQUENCES)))
    return tuple(found)


def fits(way: str, shape: ModelShape, device: DeviceSpec, tokens: int, recompute: bool, ranks: Ranks = ONE_RANK) -> bool:
    """Whether both memories hold the model that way."""
    n, shards = len(shape.units), unit_shards(shape, ranks)

    def placed(k: int) -> Footprint:
        rest = sum(shards[k:]) if way == "streamed" else 0
        return footprint(shape, tokens, k, recompute, rest, ranks)

    if way in ("device", "host"):
        return footprint(shape, tokens, n if way == "device" else 0, recompute, ranks=ranks).fits(device)
    # More resident units take less of the host and more of the device: the fewest that the host
    # asks for, or all, which need no ring.
    least = bisect_left(range(n), True, key=lambda k: placed(k).host_fits(device))
    return placed(least).fits(device) or placed(n).fits(device)


def most_layers(holds: Callable[[int], bool]) -> int:
    """The most layers that hold, up to MOST_LAYERS; 0 = none."""
    return _largest(holds, MOST_LAYERS)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest count up to `most` that holds; it holds up to some count and for none above."""
    return bisect_left(range(1, most + 1), True, key=lambda count: not holds(count))
