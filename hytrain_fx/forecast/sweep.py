"""The same comparison over other micro-batches and other sizes of the model.

It shows where which system pays.

Played in coarser pieces than the report's own case, so that a sweep over a model of 70 G parameters
takes a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from hytrain_fx.forecast.device import DeviceSpec, analytic_profile
from hytrain_fx.forecast.memory import states_budget_bytes
from hytrain_fx.forecast.shapes import ModelShape
from hytrain_fx.forecast.systems import SYSTEMS, Case
from hytrain_fx.ir.limits import CHUNK_PARAMS

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_CHUNKS = 240  # chunks that are played of a model in a sweep


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
class Sweep:
    """Points over tokens at the report's model, and over layers at its micro-batch.

    There are none over layers where no layers repeat.
    """

    tokens: tuple[Point, ...] = ()
    sizes: tuple[Point, ...] = ()


@dataclass(frozen=True)
class SweepOf:
    """Makes points of one case of the report, with other tokens or layers."""

    shape: ModelShape
    device: DeviceSpec
    sequence: int
    recompute: bool
    budget_bytes: int | None

    def sweep(self, tokens: int) -> Sweep:
        """Micro-batches and numbers of layers around the case by `FACTORS`.

        Whole sequences where there are several.
        """
        least = self.sequence if tokens >= self.sequence else 1
        batches = sorted({max(least, int(factor * tokens) // least * least) for factor in FACTORS})
        layers = self.shape.layers
        counts = sorted({max(1, round(factor * layers)) for factor in FACTORS}) if layers else []
        return Sweep(tuple(self.point(self.shape, batch) for batch in batches),
                     tuple(self.point(self.shape.with_layers(count), tokens) for count in counts))

    def point(self, shape: ModelShape, tokens: int) -> Point:
        """All systems at one size and micro-batch."""
        profile = analytic_profile(shape, self.device, tokens, self.recompute, sequence=min(self.sequence, tokens))
        budget = states_budget_bytes(shape, self.device, tokens, self.recompute) if self.budget_bytes is None else self.budget_bytes
        case = Case(shape, self.device, profile, tokens, self.recompute, budget, self.budget_bytes is None,
                    max(CHUNK_PARAMS, shape.params // _CHUNKS))
        rows = [case.row_of(system, case.plan_of(system)) for system in SYSTEMS]
        return Point(tokens, shape.layers or None, shape.params, profile.forward_us + profile.backward_us,
                     {row.system: row.step_us for row in rows}, {row.system: row.k for row in rows}, {row.system: row.fits for row in rows})
