"""How much to stream.

The share y that exposes least with a given k, and the parameters that make it up.

For a given k the exposed time is convex in y (`windows.py`): the golden section finds its least,
bisection the smallest y that reaches it. Whole parameters are streamed, chosen so that of every
prefix of units as near y as possible is. One of the first unit may be cut (`cuts.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from hytrain_fx.cost_model.pieces import Span
from hytrain_fx.cost_model.windows import Windows
from hytrain_fx.ir.limits import LEAST_GAIN_SHARE, SMALL_PARAMETER_SHARE
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.profile import UnitProfile
from hytrain_fx.ir.task_graph import Unit

_FLAT = 0.001  # share of the step: of shares that differ by less the smaller is taken
_ROUNDS = 14
_GOLDEN = (math.sqrt(5) - 1) / 2


def best_share(windows: Windows, k: int, compute_us: float) -> float:
    """The share y in 0..1 that exposes least with the first k units on the device.

    0 unless it shortens the step by 1%.
    """

    def exposed_us(share: float) -> float:
        return windows.streaming(share).exposed_us(k)

    without_us = compute_us + exposed_us(0.0)
    least = min(least_of_convex(exposed_us, 0.0, 1.0), 1.0, key=exposed_us)
    if without_us - compute_us - exposed_us(least) < LEAST_GAIN_SHARE * without_us:
        return 0.0
    enough_us = exposed_us(least) + _FLAT * without_us
    low = 0.0
    for _ in range(_ROUNDS):
        middle = (low + least) / 2
        low, least = (low, middle) if exposed_us(middle) <= enough_us else (middle, least)
    return least


def best_mix(windows: Windows, k: int, least_k: int, compute_us: float) -> tuple[int, float]:
    """k and y together.

    y for the `k` that is best without streaming and fits, then the fewest units that do as well
    with streaming.
    """
    share = best_share(windows, k, compute_us)
    if share == 0.0:
        return k, 0.0
    enough_us = windows.streaming(share).exposed_us(k) + _FLAT * compute_us
    while k > least_k:
        fewer = best_share(windows, k - 1, compute_us)
        if fewer == 0.0 or windows.streaming(fewer).exposed_us(k - 1) > enough_us:
            break
        k, share = k - 1, fewer
    return k, share


def least_of_convex(value: Callable[[float], float], low: float, high: float, rounds: int = _ROUNDS) -> float:
    """Where a convex function of low..high is least, to a thousandth of the span by 14 rounds.

    By golden section. It asks for two values and one more in each round.
    """
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = value(left), value(right)
    for _ in range(rounds):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = value(right)
    return (low + high) / 2


def ranges_of(units: Sequence[Unit | UnitProfile], share: float, cut: Span | None = None) -> list[list[tuple[int, int, Placement]]]:
    """Each unit as ranges (begin, end, placement), CPU or STREAM.

    They are whole parameters in order, equal neighbours merged.

    Of each unit those neighbouring parameters are streamed that bring the streamed part of all
    units so far nearest to `share`. With a `cut` that range of the first unit is, and nothing else
    of it; the units after it make up for what that is more or less than the share.
    """
    split: list[list[tuple[int, int, Placement]]] = []
    wanted, streamed = 0.0, 0
    for unit in units:
        numels = unit.param_numels or (unit.params,)
        wanted += share * unit.params
        if cut is not None and not split:
            streamed += cut.numel
            split.append(_ranges_of_cut(unit.params, cut))
            continue
        chosen = nearest_run(numels, wanted - streamed) if share > 0 else frozenset()
        streamed += sum(numels[i] for i in chosen)
        split.append(_ranges(numels, chosen))
    return split


def nearest_run(numels: Sequence[int], wanted: float) -> frozenset[int]:
    """The positions of neighbouring parameters whose elements sum nearest to `wanted`.

    Small ones are passed over; of equals the last.
    """
    large = [i for i, numel in enumerate(numels) if numel >= SMALL_PARAMETER_SHARE * max(numels)]
    ends = list(accumulate((numels[i] for i in large), initial=0))
    runs = []
    for begin in reversed(range(len(ends))):
        end = max(bisect_left(ends, ends[begin] + wanted), begin)
        runs += [(begin, e) for e in (end, end - 1) if begin <= e < len(ends)]
    begin, end = min(runs, key=lambda run: abs(ends[run[1]] - ends[run[0]] - wanted))
    return frozenset(large[begin:end])


def _ranges(numels: Sequence[int], chosen: frozenset[int]) -> list[tuple[int, int, Placement]]:
    ranges: list[tuple[int, int, Placement]] = []
    for i, (end, numel) in enumerate(zip(accumulate(numels), numels, strict=True)):
        place = Placement.STREAM if i in chosen else Placement.CPU
        begin = ranges.pop()[0] if ranges and ranges[-1][2] is place else end - numel
        ranges.append((begin, end, place))
    return ranges


def _ranges_of_cut(params: int, cut: Span) -> list[tuple[int, int, Placement]]:
    ranges = ((0, cut.begin, Placement.CPU), (cut.begin, cut.end, Placement.STREAM), (cut.end, params, Placement.CPU))
    return [of for of in ranges if of[0] < of[1]]
