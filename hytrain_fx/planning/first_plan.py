"""Plans that need no measured times: of a given k, and the one used until times are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from hytrain_fx.config import Config
from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.cost_model.reasons import given_share_reason
from hytrain_fx.errors import ConfigError, HostMemoryError, UnsupportedError
from hytrain_fx.ir.plan import Placement, Plan, renumbered
from hytrain_fx.ir.task_graph import Unit
from hytrain_fx.planning.model_units import ModelUnits, StateSizes
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.memory import host_budget_bytes

FIRST_STEPS = "first steps"  # the source of a plan that is in force until times are measured


def given_share(config: Config) -> float:
    """The streamed share that was asked for, 0 where it is to be solved."""
    return 0.0 if config.stream == "auto" else float(config.stream)


def first_plan(config: Config, units: ModelUnits, sizes: StateSizes, engine: Engine, *, device_bytes: float, streams: bool) -> Plan:
    """Where states rest until times are measured.

    As told; without that on the host, as far as it holds them.

        device_bytes    what the device has
        streams         whether states may be streamed later

    Raises UnsupportedError where states are to be streamed and the engine cannot; ConfigError and
    HostMemoryError like `require_room`.
    """
    known = units()
    if config.plan is not None:
        plan = renumbered(config.plan, known)
    elif config.k != "auto":
        plan = fixed_plan(config, known)
    else:
        require_room(config, known, sizes.device_bytes_per_param(), sizes.host_bytes_per_param(), device_bytes=device_bytes,
                     slots=not streams)
        plan = plan_until_measured(config, known, lambda unit: sizes.host_bytes(units.rows_of(unit)))
    if plan.numel(Placement.STREAM) and not engine.can_stream:
        asked = f"stream={config.stream!r}" if config.plan is None else "the given plan"
        raise UnsupportedError(f"{asked} streams states, and the {engine.name} engine cannot; expected engine=\"native\", or "
                               "stream=0 and a plan without streamed shares")
    return plan


def fixed_plan(config: Config, units: Sequence[Unit]) -> Plan:
    """The first k units on the device, for a k that was given.

    Raises ConfigError where there are fewer units.
    """
    k = int(config.k)
    if k > len(units):
        raise ConfigError(f'option k={k}: expected "auto" or at most {len(units)}, the number of units of this model')
    return prefix_plan(units, k, source="fixed k", reason=lambda unit: f"k={k} was given", share=given_share(config),
                       streamed_reason=lambda unit: given_share_reason(unit, k))


def require_room(
    config: Config, units: Sequence[Unit], device_bytes_per_param: float, host_bytes_per_param: float, *, device_bytes: float, slots: bool
) -> None:
    """Raise where `gpu_states` and the host's memory together hold no plan.

    ConfigError for an option, HostMemoryError for the machine.

        device_bytes    what the device has: with gpu_states="auto" no more is known before steps
                        have run
        slots           whether every unit on the host has a slot for its gradient; streamed units
                        have none
    """
    total = device_bytes_per_param * sum(unit.params for unit in units)
    if config.gpu_states == "auto":
        on_device = device_bytes
    else:
        on_device = config.gpu_states * total if isinstance(config.gpu_states, float) else config.gpu_states
    most = sum(nbytes <= on_device for nbytes in accumulate(device_bytes_per_param * unit.params for unit in units))
    needed = sum(host_bytes_per_param * unit.params + (unit.grad_bytes if slots else 0) for unit in units[most:])
    limit = host_budget_bytes(config.host_memory)
    if needed <= limit:
        return
    why = (f"gpu_states={config.gpu_states!r} leaves the states of {len(units) - most} of {len(units)} units to the host, "
           f"{math.ceil(needed)} bytes")
    if config.host_memory is None:
        raise HostMemoryError(f"no plan fits the memory: {why}; the host has {limit} bytes for them. Keep more of them on the device "
                              "(gpu_states=...), or set host_memory where that figure is known to be wrong")
    raise ConfigError(f"option host_memory={config.host_memory} and gpu_states={config.gpu_states!r}: no plan fits; {why}; expected "
                      "more of one of the two")


def plan_until_measured(config: Config, units: Sequence[Unit], host_bytes: Callable[[Unit], int]) -> Plan:
    """Every unit on the host, except the first ones if it does not hold them all.

    `host_bytes` gives the bytes of a unit's states there.
    """
    limit = host_budget_bytes(config.host_memory)
    left = [host_bytes(unit) for unit in units]
    k = 0
    while k < len(units) and sum(left[k:]) > limit:
        k += 1
    fits = f"the host's {limit / 2**30:.1f} GiB hold the states of the last {len(units) - k} units"
    why = "times are not measured yet" if k == 0 else fits
    return prefix_plan(units, k, source=FIRST_STEPS, reason=lambda unit: why, share=given_share(config),
                       streamed_reason=lambda unit: given_share_reason(unit, k))
