"""What the two memories hold.

The most leading units with their states on the device, and the fewest that leave the host enough
room.

    per parameter    device                                  host
    resident         states                                  -
    updated by CPU   - (gradients pass through a ring)       states + slot (gradient in, weight out)
    streamed         its gradient until it is updated        states
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.pieces import params_kept, pieces_of
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.limits import HALF_BYTES
from hytrain_fx.ir.plan import Placement, Plan, PlanRow
from hytrain_fx.ir.profile import COLLECTIVE_TIMES, FETCH_TIMES, GATHER_TIMES, STREAM_TIMES, Profile, UnitProfile
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM
from hytrain_fx.ir.task_graph import Unit

ROUNDED: Final = 1 + 1e-12
"""Factor by which sums may be off, as bytes of a parameter are means: all states fit their sum."""


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """What one unit takes of either memory.

    device      its states there, with the gradients that stay until their update
    gradients   these gradients alone: they stay of streamed parameters too
    host        its states there, without slots
    slots       on the host, for gradients and new weights, as far as the CPU updates it
    """

    device: float
    gradients: float
    host: float
    slots: float


@dataclass(frozen=True)
class Budget:
    """Bytes for optimizer states by tier, None = no limit, and the bytes of a parameter on each.

    device_state_bytes    per resident parameter
    host_state_bytes      per parameter updated by the CPU or streamed, slot not counted
    counts_streamed       whether gradients and staging slots of streamed parameters come out of
                          `device_bytes` too: they do where that is what the device has free, not
                          where it is a bound on resident states. So do weights that rest on the
                          host only as long as the CPU updates them
    staged_bytes          per parameter that a staging slot has room for; None = `host_state_bytes`
    of_units              by unit, where they are known: units with other states take other bytes

    Raises PlanError for negative figures.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    device_state_bytes: float = STATE_BYTES_PER_PARAM
    host_state_bytes: float = STATE_BYTES_PER_PARAM
    counts_streamed: bool = True
    staged_bytes: float | None = None
    of_units: tuple[UnitBytes, ...] = ()

    def __post_init__(self) -> None:
        if min(self.device_bytes or 0, self.device_state_bytes, self.host_bytes or 0, self.host_state_bytes, self.staged_bytes or 0) < 0:
            raise PlanError(f"found a budget of {self.device_bytes} bytes on the device at {self.device_state_bytes} a parameter and of "
                            f"{self.host_bytes} bytes on the host at {self.host_state_bytes}, expected all >= 0")

    def of(self, unit: Unit | UnitProfile) -> UnitBytes:
        """What a unit takes."""
        if self.of_units:
            return self.of_units[unit.index]
        return UnitBytes(self.device_state_bytes * unit.params, unit.grad_bytes, self.host_state_bytes * unit.params, unit.grad_bytes)

    def most_units(self, profile: Profile, share: float, discipline: Discipline) -> int:
        """k_mem: how many leading units rest on the device.

        Next to them are the gradients and staging slots of a streamed share of the others, and the
        weights of both that would else rest on the host.

        -1 where the streamed share does not even fit without a unit there.
        """
        if self.device_bytes is None:
            return len(profile.units)
        share = share if self.counts_streamed else 0.0
        staging = self.staging_bytes(profile.units, discipline) if share else 0.0
        weights = {u.index: u.fetch_bytes if self.counts_streamed else 0 for u in profile.units}
        of = [(self.of(u), weights[u.index]) for u in profile.units]
        streamed = share * sum(unit.gradients + weight for unit, weight in of) + staging
        used = accumulate((unit.device + weight - share * (unit.gradients + weight) for unit, weight in of), initial=streamed)
        return max((k for k, nbytes in enumerate(used) if nbytes <= self.device_bytes * ROUNDED), default=-1)

    def least_units(self, profile: Profile, share: float, copied_params: int = 0) -> int:
        """The smallest k whose remaining units fit the host.

        Beside the states of so many parameters, while they are copied for another cut.
        """
        if self.host_bytes is None:
            return 0
        of = [self.of(u) for u in profile.units]
        copied = of[0].host * copied_params / profile.units[0].params
        needed = accumulate((unit.host + (1 - share) * unit.slots for unit in reversed(of)), initial=copied)
        return len(of) - max(bisect_right(list(needed), self.host_bytes) - 1, 0)

    def device_needs(self, units: Sequence[Unit | UnitProfile], plan: Plan, discipline: Discipline) -> float:
        """What the plan takes of `device_bytes`."""
        resident = sum(self.of(unit := units[row.unit]).device * row.numel / unit.params
                       for row in plan.rows if row.placement.rests_on_device)
        if not self.counts_streamed:
            return resident
        weights = sum(HALF_BYTES * (unit := units[row.unit]).fetched_params * row.numel / unit.params
                      for row in plan.rows if not row.placement.updates_on_cpu)
        staging = self.staging_bytes(units, discipline) if plan.numel(Placement.STREAM) else 0.0
        return resident + weights + staging + sum(self._kept_bytes(plan, unit) for unit in units)

    def _kept_bytes(self, plan: Plan, unit: Unit | UnitProfile) -> float:
        """Gradients that stay on the device though its states do not."""
        there = sum(row.numel for row in plan.shares(unit.index) if row.placement.rests_on_device)
        return self.of(unit).gradients * max(params_kept(plan, unit) - there, 0) / unit.params

    def host_needs(self, units: Sequence[Unit | UnitProfile], plan: Plan) -> float:
        """What the plan takes of `host_bytes`."""
        def needed(row: PlanRow) -> float:
            of = self.of(units[row.unit])
            return of.host + (of.slots if row.placement.updates_on_cpu else 0.0)

        return sum(needed(row) * row.numel / units[row.unit].params for row in plan.rows if not row.placement.rests_on_device)

    def holds_copies(self, units: Sequence[Unit | UnitProfile], whole: Plan, cut: Plan) -> bool:
        """Whether the host holds what a move to `cut` copies, beside what `whole` takes.

        Of a cut parameter of unit `whole.k`: its part on the host, and its unit's new slots.
        """
        if self.host_bytes is None:
            return True
        unit, of, pieces = units[whole.k], self.of(units[whole.k]), pieces_of(cut, units[whole.k])
        ends = list(accumulate(unit.param_numels or (unit.params,)))
        parts = [piece for piece in pieces if piece.begin not in (0, *ends) or piece.end not in ends]
        copied = sum(piece.numel for piece in parts if not piece.placement.rests_on_device)
        slotted = sum(piece.numel for piece in pieces if piece.placement.updates_on_cpu) if parts else 0
        return self.host_needs(units, whole) + (of.host * copied + of.slots * slotted) / unit.params <= self.host_bytes

    def staging_bytes(self, units: Sequence[Unit | UnitProfile], discipline: Discipline) -> float:
        """Device memory that streamed states pass through."""
        largest = max(max(u.param_numels or (u.params,)) for u in units)
        per_param = self.host_state_bytes if self.staged_bytes is None else self.staged_bytes
        return discipline.staging_slots * min(discipline.staging_params, largest) * per_param


# ---- What a plan says of its origin: sums of the profile, and the memory it had to fit in ----


def inputs_of(profile: Profile, guard: float) -> dict[str, float]:
    """What a plan says of the profile that it was solved from.

    Sums over units in microseconds, sizes, the guard.
    """
    inputs = {
        "units": float(len(profile.units)),
        "params": float(profile.params),
        "t_fwd_us": profile.forward_us,
        "t_bwd_us": profile.backward_us,
        "t_upd_cpu_us": profile.cpu_update_us,
        "t_upd_gpu_us": profile.gpu_update_us,
        "t_d2h_us": profile.d2h_us,
        "t_h2d_us": profile.h2d_us,
        "guard": guard,
        "steps_measured": float(profile.steps),
    }
    alpha = profile.alpha if math.isfinite(profile.alpha) else None
    known = {"alpha": alpha, "tokens": profile.tokens, "host_memory_gb_per_s": profile.host_memory_gb_per_s}
    inputs |= {f"t_{name}": us for name in ("between_us", "bubble_us") if (us := getattr(profile, name))}
    if profile.can_stream:
        inputs |= {f"t_{name}": sum(getattr(u, name) for u in profile.units) for name in STREAM_TIMES}
    if profile.fetches:
        inputs |= {f"t_{name}": sum(getattr(u, name) for u in profile.units) for name in FETCH_TIMES}
    if profile.gathers:
        inputs |= {f"t_{name}": sum(getattr(u, name) for u in profile.units) for name in GATHER_TIMES}
    if profile.has_collectives:
        inputs |= {f"t_{name}": sum(getattr(u, name) for u in profile.units) for name in COLLECTIVE_TIMES}
        inputs |= {"node_ranks": float(profile.node_ranks), "skew": profile.skew}
    return inputs | {name: float(value) for name, value in known.items() if value is not None}


def budget_inputs(profile: Profile, budget: Budget) -> dict[str, float]:
    """The device memory for states, where it is limited, and how it is counted; bytes."""
    inputs = {"state_bytes_per_param": float(budget.device_state_bytes)}
    if budget.device_bytes is not None:
        inputs["budget_bytes"] = float(budget.device_bytes)
    if profile.can_stream:
        inputs["budget_counts_streamed"] = float(budget.counts_streamed)
    return inputs
