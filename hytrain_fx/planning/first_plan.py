"""Plans that need no measured times: of a given k, and the one used until times are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from hytrain_fx.config import Config
from hytrain_fx.cost_model.planner import SHARES_THAT_MAY_FIT, prefix_plan
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
        most_k = most_on_device(config, known, sizes.device_bytes_per_param(), device_bytes)
        shares, limit_bytes = _shares(config, streams=streams), host_budget_bytes(config.host_memory)
        require_room(config, known, sizes.host_bytes_per_param(), most_k=most_k, most_streamed=shares[-1], limit_bytes=limit_bytes)
        plan = plan_until_measured(known, lambda unit, place: sizes.host_bytes(units.rows_of(unit), place), most_k=most_k, shares=shares,
                                   limit_bytes=limit_bytes)
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


def _shares(config: Config, *, streams: bool) -> tuple[float, ...]:
    """Shares that may be streamed before times are known, the smallest first."""
    if config.stream != "auto":
        return (given_share(config),)
    return (0.0, *SHARES_THAT_MAY_FIT) if streams else (0.0,)


def most_on_device(config: Config, units: Sequence[Unit], bytes_per_param: float, device_bytes: float) -> int:
    """How many leading units `gpu_states` lets rest on the device.

        bytes_per_param    of states and gradient there
        device_bytes       what the device has: with gpu_states="auto" no more is known before steps
                           have run
    """
    room = device_bytes
    if config.gpu_states != "auto":
        total = bytes_per_param * sum(unit.params for unit in units)
        room = config.gpu_states * total if isinstance(config.gpu_states, float) else config.gpu_states
    return sum(bytes_per_param * params <= room for params in accumulate(unit.params for unit in units))


def require_room(
    config: Config, units: Sequence[Unit], host_bytes_per_param: float, *, most_k: int, most_streamed: float, limit_bytes: int
) -> None:
    """Raise where `gpu_states` and the host's memory together hold no plan.

    ConfigError for an option, HostMemoryError for the machine.

        most_k           units that may rest on the device
        most_streamed    share of the others that may be streamed: it has no slots for gradients
        limit_bytes      for states on the host
    """
    needed = sum(host_bytes_per_param * unit.params + (1 - most_streamed) * unit.grad_bytes for unit in units[most_k:])
    if needed <= limit_bytes:
        return
    why = (f"gpu_states={config.gpu_states!r} leaves the states of {len(units) - most_k} of {len(units)} units to the host, "
           f"{math.ceil(needed)} bytes")
    if config.host_memory is None:
        raise HostMemoryError(f"no plan fits the memory: {why}; the host has {limit_bytes} bytes for them. Keep more of them on the device "
                              "(gpu_states=...), or set host_memory where that figure is known to be wrong")
    raise ConfigError(f"option host_memory={config.host_memory} and gpu_states={config.gpu_states!r}: no plan fits; {why}; expected "
                      "more of one of the two")


def plan_until_measured(
    units: Sequence[Unit], host_bytes: Callable[[Unit, Placement], int], *, most_k: int, shares: Sequence[float], limit_bytes: int
) -> Plan:
    """Every unit on the host, except the first ones if it does not hold them all.

    Where more than `most_k` would have to be on the device, these are, and of the others the least
    of `shares` is streamed with which the host holds them, as what is streamed has no slots there.

        host_bytes     what a unit takes of the host in either placement
        shares         the smallest first
        limit_bytes    for states on the host
    """
    by_cpu = [host_bytes(unit, Placement.CPU) for unit in units]
    least_k = next(k for k in range(len(units) + 1) if sum(by_cpu[k:]) <= limit_bytes)
    k = min(least_k, most_k)
    on_host = len(units) - k
    fits = f"the host's {limit_bytes / 2**30:.1f} GiB hold the states of the last {on_host} units"
    why = "times are not measured yet" if on_host == len(units) else fits

    def streamed_why(unit: int) -> str:
        return given_share_reason(unit, k) if k == least_k else "streamed: the host has no room for the slots of all that is on it"

    def of_share(share: float) -> Plan:
        return prefix_plan(units, k, source=FIRST_STEPS, reason=lambda unit: why, share=share, streamed_reason=streamed_why)

    if k == least_k:
        return of_share(shares[0])
    fitting = (plan for plan in map(of_share, shares) if _bytes_on_host(plan, units, host_bytes) <= limit_bytes)
    return next(fitting, None) or of_share(shares[-1])


def _bytes_on_host(plan: Plan, units: Sequence[Unit], host_bytes: Callable[[Unit, Placement], int]) -> float:
    return sum(host_bytes(units[row.unit], row.placement) * row.numel / units[row.unit].params
               for row in plan.rows if not row.placement.rests_on_device)
