"""Plans that need no measured times: of a given k, and the one used until times are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from hytrain_fx.config import Config
from hytrain_fx.cost_model.budget import ROUNDED
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
    if config.plan is not None:
        plan = renumbered(config.plan, units())
    elif config.k != "auto":
        plan = fixed_plan(config, units())
    else:
        plan = _plan_that_fits(config, units, sizes, device_bytes=device_bytes, streams=streams)
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


def _plan_that_fits(config: Config, units: ModelUnits, sizes: StateSizes, *, device_bytes: float, streams: bool) -> Plan:
    """The plan until times are measured; raises as `require_room` does.

    Whether autocast will give fp32 weights copies is not known yet. So states count on the device
    as with copies, as plans do later, unless only without them both memories hold all.
    """
    known, limit_bytes = units(), host_budget_bytes(config.host_memory)
    needed = 0
    for as_copied in (True, False) if sizes.may_copy else (False,):
        of_units = [sizes.of(units.rows_of(unit), as_copied=as_copied) for unit in known]
        plan = plan_until_measured(known, [of.host + of.slots for of in of_units], lambda plan: sizes.host_bytes_of(units.pieces_of(plan)),
                                   most_k=most_on_device(config, [of.device for of in of_units], device_bytes),
                                   shares=_shares(config, streams=streams), limit_bytes=limit_bytes)
        needed = sizes.host_bytes_of(units.pieces_of(plan))
        if needed <= limit_bytes:
            break
    require_room(config, len(known), plan.k, needed_bytes=needed, limit_bytes=limit_bytes)
    return plan


def most_on_device(config: Config, units_bytes: Sequence[float], device_bytes: float) -> int:
    """How many leading units `gpu_states` lets rest on the device.

        units_bytes     of states and gradients there, by unit
        device_bytes    what the device has: with gpu_states="auto" no more is known before steps
                        have run
    """
    room = device_bytes
    if config.gpu_states != "auto":
        room = config.gpu_states * sum(units_bytes) if isinstance(config.gpu_states, float) else config.gpu_states
    return sum(nbytes <= room * ROUNDED for nbytes in accumulate(units_bytes))


def require_room(config: Config, units: int, k: int, *, needed_bytes: int, limit_bytes: int) -> None:
    """Raise where `gpu_states` and the host's memory together hold no plan.

    ConfigError for an option, HostMemoryError for the machine.

        k               of all units, those on the device where the host has the least
        needed_bytes    of the host by that plan, for states and slots
        limit_bytes     for them
    """
    if needed_bytes <= limit_bytes:
        return
    streamed = "" if config.stream == "auto" else f" and stream={config.stream!r}"
    why = (f"gpu_states={config.gpu_states!r}{streamed} leaves the states of {units - k} of {units} units to the host, "
           f"{needed_bytes} bytes with their slots")
    if config.host_memory is None:
        raise HostMemoryError(f"no plan fits the memory: {why}; the host has {limit_bytes} bytes for them. Keep more of them on the device "
                              "(gpu_states=...), or set host_memory where that figure is known to be wrong")
    raise ConfigError(f"option host_memory={config.host_memory} and gpu_states={config.gpu_states!r}: no plan fits; {why}; expected "
                      "more of one of the two")


def plan_until_measured(
    units: Sequence[Unit], by_cpu_bytes: Sequence[float], host_bytes: Callable[[Plan], float], *, most_k: int, shares: Sequence[float],
    limit_bytes: int
) -> Plan:
    """Every unit on the host, except the first ones if it does not hold them all.

    Where more than `most_k` would have to be on the device, these are, and of the others the least
    of `shares` is streamed with which the host holds them, as what is streamed has no slots there.
    Where none is enough, the plan with the most.

        by_cpu_bytes   what each unit takes of the host where the CPU updates it
        host_bytes     what a plan takes of it
        shares         the smallest first
        limit_bytes    for states and slots on the host
    """
    least_k = next(k for k in range(len(units) + 1) if sum(by_cpu_bytes[k:]) <= limit_bytes)
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
    fitting = (plan for plan in map(of_share, shares) if host_bytes(plan) <= limit_bytes)
    return next(fitting, None) or of_share(shares[-1])
