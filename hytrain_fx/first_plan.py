"""Plans that need no measured times: of a given k, and the one that is in force until times are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hytrain_fx.config import Config
from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.cost_model.reasons import given_share_reason
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.task_graph import Unit
from hytrain_fx.runtime.memory import host_budget_bytes

FIRST_STEPS = "first steps"  # the source of a plan that is in force until times are measured


def given_share(config: Config) -> float:
    """The streamed share that was asked for, 0 where it is to be solved."""
    return 0.0 if config.stream == "auto" else float(config.stream)


def fixed_plan(config: Config, units: Sequence[Unit]) -> Plan:
    """The first k units on the device, for a k that was given."""
    k = int(config.k)
    return prefix_plan(units, min(k, len(units)), source="fixed k", reason=lambda unit: f"k={k} was given", share=given_share(config),
                       streamed_reason=lambda unit: given_share_reason(unit, k))


def plan_until_measured(config: Config, units: Sequence[Unit], host_bytes: Callable[[Unit], int]) -> Plan:
    """Every unit on the host, but for the first ones where it does not hold them; `host_bytes` of a unit's states there."""
    limit = host_budget_bytes(config.host_memory)
    left = [host_bytes(unit) for unit in units]
    k = 0
    while k < len(units) and sum(left[k:]) > limit:
        k += 1
    fits = f"the host's {limit / 2**30:.1f} GiB hold the states of the last {len(units) - k} units"
    why = "times are not measured yet" if k == 0 else fits
    return prefix_plan(units, k, source=FIRST_STEPS, reason=lambda unit: why, share=given_share(config),
                       streamed_reason=lambda unit: given_share_reason(unit, k))
