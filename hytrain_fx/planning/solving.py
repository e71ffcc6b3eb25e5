"""Plans solved from a profile, within the memory that there is.

Also what is predicted of them, and what a move to them costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hytrain_fx.config import Config
from hytrain_fx.cost_model.budget import ROUNDED, Budget, UnitBytes
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.fetch_depth import FetchDepth, fetch_depth
from hytrain_fx.cost_model.planner import Stream, predict, streamed_k
from hytrain_fx.cost_model.planner import plan as solve
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.limits import HALF_BYTES
from hytrain_fx.ir.plan import PlacedPiece, Placement, Plan, PlanRow
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import Unit
from hytrain_fx.planning.first_plan import fixed_plan, given_share
from hytrain_fx.planning.model_units import ModelUnits, StateSizes
from hytrain_fx.runtime.memory import device_budget_bytes, host_budget_bytes
from hytrain_fx.runtime.states.store import StateStore


class Solver:
    """Solves for one model on one device, as `config` asks.

    most_bytes   states may take no more of the device, as memory ran out; None: what is free
    """

    def __init__(self, config: Config, device: torch.device, units: ModelUnits, sizes: StateSizes, *, can_stream: bool) -> None:
        self._config = config
        self._device = device
        self._units = units
        self._sizes = sizes
        self._can_stream = can_stream
        self.most_bytes: int | None = None
        self._of_all: tuple[Profile, int | None, Plan | None] | None = None  # all on the device, for a profile and `most_bytes`
        self._depths: dict[tuple[PlanRow, ...], FetchDepth] = {}  # of plans that may come into force

    @property
    def solves(self) -> bool:
        """Whether plans are solved, and not given."""
        return self._config.plan is None and self._config.k == "auto"

    @property
    def solves_share(self) -> bool:
        """Whether the streamed share is."""
        return self.solves and self._config.stream == "auto"

    @property
    def may_give_way(self) -> bool:
        """Whether a plan with fewer states on the device may be put in force."""
        return self.solves and self._config.gpu_states == "auto"

    @property
    def may_stream(self) -> bool:
        """Whether times for streaming are of use.

        On a CPU nothing is streamed that was not asked for, and nowhere what could not be pinned.
        """
        config = self._config
        wanted = self._device.type == "cuda" if config.stream == "auto" else given_share(config) > 0
        given = config.plan is not None and config.plan.numel(Placement.STREAM) > 0
        return self._can_stream and (wanted or given) and self._sizes.may_be_streamed

    def given(self, profile: Profile | None, in_force: Plan, discipline: Discipline) -> Plan:
        """The plan that was given, with its prediction where there is a profile."""
        if profile is None:
            return fixed_plan(self._config, self._units())
        if self._config.plan is not None:
            return self.renewed(profile, in_force, discipline)
        share = given_share(self._config)
        made = solve(profile, k=int(self._config.k), stream=share, discipline=discipline, **self._bytes())
        return self._looking_ahead(profile, made, discipline)

    def solved(self, profile: Profile, guard: float, discipline: Discipline) -> Plan:
        """The best plan, by the rule asked for. Raises PlanError where memory holds none."""
        config = self._config
        stream: Stream = config.stream if config.stream == "auto" else given_share(config)
        made = solve(profile, rule=config.planner, stream=stream if self.may_stream else 0.0, **self._within(guard, discipline))
        return self._looking_ahead(profile, made, discipline)

    def renewed(self, profile: Profile, in_force: Plan, discipline: Discipline) -> Plan:
        """The plan in force with what this profile says of it."""
        return self._looking_ahead(profile, self.predicted(profile, in_force, discipline), discipline)

    def _looking_ahead(self, profile: Profile, made: Plan, discipline: Discipline) -> Plan:
        """The plan with its prediction for as many units brought ahead as are best for it.

        Not on a CPU, where the launching thread copies itself.
        """
        depth = None
        if self._units.window is not None and self._device.type != "cpu":
            depth = fetch_depth(profile, made, discipline, self._slots_bytes(made))
        if depth is None:
            return made
        self._depths[made.rows] = depth
        return self.predicted(profile, made, replace(discipline, units_ahead=depth.ahead))

    def follow(self, in_force: Plan) -> None:
        """Bring as many units ahead as were found for the plan that is now in force."""
        if self._units.window is not None and in_force.rows in self._depths:
            self._units.window.follow(self._depths[in_force.rows])
        self._depths.clear()

    def _slots_bytes(self, made: Plan) -> int:
        """What slots of weights may take on the device: theirs now, and what the plan leaves."""
        of_units = self._of_units(units := self._units())
        taken = sum((of_units[row.unit].device + HALF_BYTES * units[row.unit].fetched_params) * row.numel / units[row.unit].params
                    for row in made.rows if row.placement.rests_on_device)
        free = device_budget_bytes("auto", self._device, 0.0, self._resident_bytes())
        return max(int(free - taken), 0) + (self._units.window.slot_bytes if self._units.window else 0)

    def _resident_bytes(self) -> int:
        """What rests on the device: states, their gradients, weights that came back with them."""
        return self._sizes.resident_device_bytes() + (self._units.window.back_bytes() if self._units.window else 0)

    def keeps_k(self, profile: Profile, guard: float, discipline: Discipline, k: int) -> bool:
        """Whether k would be solved again: then a balanced share stays too."""
        return streamed_k(profile, **self._within(guard, discipline)) == k

    def all_on_device(self, profile: Profile, guard: float, discipline: Discipline) -> Plan | None:
        """All states on the device, None where they do not fit. Solved once for a profile."""
        if self._of_all is None or self._of_all[0] is not profile or self._of_all[1] != self.most_bytes:
            self._of_all = (profile, self.most_bytes, self._all_on_device(profile, guard, discipline))
        return self._of_all[2]

    def on_device_us(self, profile: Profile | None, guard: float, discipline: Discipline, present: Plan) -> float | None:
        """Predicted for all states on the device, where steps under a plan are compared with it.

        None without times, and on a CPU, whose steps are too uneven.
        """
        if profile is None or self._device.type != "cuda" or not self.solves or not self._config.replan_every:
            return None
        of_all = self.all_on_device(profile, guard, discipline)
        return None if of_all is None or of_all.rows == present.rows else of_all.predicted["step_us"]

    def at(self, k: int, profile: Profile, guard: float, discipline: Discipline) -> Plan:
        """The plan with k leading units on the device, or as many as memory allows, none streamed.

        Raises PlanError where memory holds none.
        """
        return solve(profile, k=k, **self._within(guard, discipline))

    def _all_on_device(self, profile: Profile, guard: float, discipline: Discipline) -> Plan | None:
        try:
            made = self.at(len(profile.units), profile, guard, discipline)
        except PlanError:
            return None
        return made if made.k == len(profile.units) else None

    def has_room(self, plan: Plan, in_force: Plan, discipline: Discipline) -> bool:
        """Whether both memories hold a plan that was not solved within them.

        What takes no more than the plan in force does is held, and staging slots that are there
        are not needed twice.
        """
        of_units = self._of_units(units := self._units())
        budget = Budget(self._budget_bytes(of_units), self._host_budget_bytes(), counts_streamed=self._config.gpu_states == "auto",
                        staged_bytes=self._sizes.staged_bytes_per_param(), of_units=of_units)
        needs, there = (budget.device_needs(units, of, discipline) for of in (plan, in_force))
        staging = budget.staging_bytes(units, discipline) if in_force.numel(Placement.STREAM) else 0.0
        on_host, now = (budget.host_needs(units, of) for of in (plan, in_force))
        return needs <= max((budget.device_bytes or 0) + staging, there) * ROUNDED and on_host <= max(budget.host_bytes or 0, now) * ROUNDED

    def predict(self, profile: Profile, plan: Plan, discipline: Discipline) -> dict[str, float]:
        """Figures of a step under `plan`."""
        return predict(profile, plan, discipline=discipline, **self._bytes())

    def predicted(self, profile: Profile, plan: Plan, discipline: Discipline) -> Plan:
        """The plan with these figures."""
        return replace(plan, predicted=self.predict(profile, plan, discipline))

    def _within(self, guard: float, discipline: Discipline) -> dict[str, Any]:
        """What a plan is solved within: memory, and how the runtime works."""
        sizes = self._bytes()
        return {
            "budget_bytes": self._budget_bytes(sizes["unit_bytes"]),
            "budget_counts_streamed": self._config.gpu_states == "auto",
            "host_budget_bytes": self._host_budget_bytes(),
            "staged_bytes_per_param": self._sizes.staged_bytes_per_param(),
            "guard": guard,
            "discipline": discipline,
            **sizes,
        }

    def _budget_bytes(self, of_units: Sequence[UnitBytes]) -> int:
        """What states may take on the device in all."""
        all_states = sum(unit.device for unit in of_units)
        budget = device_budget_bytes(self._config.gpu_states, self._device, all_states, self._resident_bytes())
        if self.most_bytes is not None:
            budget = min(budget, self.most_bytes)
        return max(int(budget * ROUNDED), 0)

    def _bytes(self) -> dict[str, Any]:
        of_units = self._of_units(units := self._units())
        params = max(sum(unit.params for unit in units), 1)
        return {"state_bytes_per_param": sum(of.device for of in of_units) / params,
                "host_state_bytes_per_param": sum(of.host for of in of_units) / params, "unit_bytes": of_units}

    def _of_units(self, units: Sequence[Unit]) -> tuple[UnitBytes, ...]:
        return tuple(self._sizes.of(self._units.rows_of(unit)) for unit in units)

    def _host_budget_bytes(self) -> int:
        """What states may take on the host in all.

        As told; else what they take already and most of what is available.
        """
        limit = self._config.host_memory
        return host_budget_bytes(limit) + (self._sizes.resident_host_bytes() if limit is None else 0)


def expected_us(plan: Plan, hope: float) -> float:
    """What a step under `plan` can be expected to take.

    The prediction, times the factor by which it was off for states on the host.
    """
    on_device = plan.numel(Placement.GPU) == sum(row.numel for row in plan.rows)
    return plan.predicted["step_us"] * (1.0 if on_device else hope)


class MoveCosts:
    """What moving states has cost in this session.

    `switch_us` is the last change between CPU and STREAM, which copies nothing. What a move took
    beyond that is for its bytes. It is summed over all moves, so that a small one, most of whose
    time was no copying, says little of a large one.
    """

    def __init__(self, sizes: StateSizes, states: StateStore) -> None:
        self.switch_us = 0.0
        self._sizes = sizes
        self._states = states
        self._copied_us, self._copied_bytes = 0.0, 0

    def took(self, before: Sequence[PlacedPiece], took_us: float) -> None:
        """States have moved from `before` to where they are."""
        moved_bytes = self._sizes.moved_bytes(before, self._states.placed)
        if moved_bytes:
            self._copied_us += max(took_us - self.switch_us, 0.0)
            self._copied_bytes += moved_bytes
        else:
            self.switch_us = took_us

    def cost_us(self, profile: Profile, wanted: Sequence[PlacedPiece]) -> float:
        """The cost of a move to `wanted`, at the rate of all moves and of a step's gradients."""
        copied_us = self._copied_us + profile.d2h_us + profile.h2d_us
        copied_bytes = self._copied_bytes + sum(2 * unit.grad_bytes for unit in profile.units)
        return self.switch_us + self._sizes.moved_bytes(self._states.placed, wanted) * copied_us / copied_bytes
