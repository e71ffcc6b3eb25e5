"""The same comparison over other micro-batches and other sizes of the model.

It shows where which system pays.

Played in coarser pieces than the report's own case, so that a sweep takes a second.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeVar

from hytrain_fx.forecast.device import MOST_TOKENS
from hytrain_fx.forecast.systems import OUR_SYSTEM, SYSTEMS, Case
from hytrain_fx.progress import Tell, untold

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_MOST_KS = 33
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Point:
    """One micro-batch of one size of the model.

    Forward and backward alone; by system the step, k, and whether both tiers hold it.
    """

    tokens: int
    layers: int | None
    params: int
    compute_us: float
    steps_us: dict[str, float]
    k: dict[str, int]
    fits: dict[str, bool]


@dataclass(frozen=True, slots=True)
class KPoint:
    """One k with nothing streamed: the step, and the device's memory.

    `fits` tells whether both tiers hold it.
    """

    k: int
    step_us: float
    device_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Sweep:
    """Points over tokens at the report's model, over layers at its micro-batch, and over k.

    There are none over layers where no layers repeat.
    """

    tokens: tuple[Point, ...] = ()
    sizes: tuple[Point, ...] = ()
    ks: tuple[KPoint, ...] = ()


def whole_batches(case: Case) -> list[int]:
    """Tokens of micro-batches around the case's by `FACTORS`: whole sequences, or the one part."""
    return _batches(case, min(case.sequence, case.tokens))


def _batches(case: Case, least: int) -> list[int]:
    batches = {max(least, int(factor * case.tokens) // least * least) for factor in FACTORS}
    return sorted(tokens for tokens in batches if tokens <= MOST_TOKENS)


def sweep_of(case: Case, tell: Tell = untold) -> Sweep:
    """Micro-batches and numbers of layers around the case by `FACTORS`.

    Whole sequences where there are several. `tell` is told how far it is.
    """
    coarse = case.in_coarse_pieces
    batches = _batches(case, case.sequence if case.tokens >= case.sequence else 1)
    layers = case.shape.layers
    counts = sorted({max(1, round(factor * layers)) for factor in FACTORS}) if layers else []
    ks = _ks(len(case.shape.units))
    played = itertools.count(1)

    def done(point: P) -> P:
        tell("the sweep", done=next(played), total=len(batches) + len(counts) + len(ks))
        return point

    return Sweep(tuple(done(_point(coarse.remade(tokens=batch))) for batch in batches),
                 tuple(done(_point(coarse.remade(shape=case.shape.with_layers(count)))) for count in counts),
                 tuple(done(_k_point(coarse, k)) for k in ks))


def _ks(units: int) -> list[int]:
    """Every k, or `_MOST_KS` of them from none to all."""
    steps = min(units, _MOST_KS - 1)
    return sorted({round(units * at / steps) for at in range(steps + 1)})


def _k_point(case: Case, k: int) -> KPoint:
    row = case.row_of(OUR_SYSTEM, case.plan_at(OUR_SYSTEM, k))
    return KPoint(k, row.step_us, row.memory.device_bytes, row.fits)


def _point(case: Case) -> Point:
    rows = [case.row_of(system, case.plan_of(system)) for system in SYSTEMS]
    return Point(case.tokens, case.shape.layers or None, case.shape.params, case.profile.forward_us + case.profile.backward_us,
                 {row.system: row.step_us for row in rows}, {row.system: row.k for row in rows}, {row.system: row.fits for row in rows})
