"""Energy of each step and token of a row of results; `hytrain_fx.runtime.energy` counts it."""

from __future__ import annotations

from typing import Any

from hytrain_fx.runtime.energy import TIERS, Counts, Meter


def energy_fields(meter: Meter, before: Counts, after: Counts, steps: int, tokens: int) -> dict[str, Any]:
    """Joules of each step and of each of its `tokens`, by tier.

    Where nothing counts they are null, and `energy_absent` says why.
    """
    found: dict[str, Any] = {}
    absent = dict(meter.absent)
    spent_j = meter.spent_j(before, after)
    for tier in TIERS:
        step_j = spent_j[tier] / steps if tier in spent_j else None
        if step_j is None:
            absent.setdefault(tier, "its counter could not be read any more")
        found[f"{tier}_joules_per_step"] = step_j
        found[f"{tier}_joules_per_token"] = None if step_j is None else step_j / tokens
    return {**found, "energy_absent": absent}
