"""An offline report: what a model would cost on a machine under each way of placing the updates.

It needs neither the model's weights nor the machine. Figures are predictions from the rates of a
`DeviceSpec`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hytrain_fx.cost_model.equation import uniform_k, uniform_sensitivities
from hytrain_fx.cost_model.host_memory import bytes_per_us, cpu_bytes
from hytrain_fx.errors import PlanError
from hytrain_fx.forecast.capacity import Capacity, capacities
from hytrain_fx.forecast.changes import Change, changes
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.memory import activation_bytes, largest_params
from hytrain_fx.forecast.models import find_model
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.shapes import Counted, ModelShape
from hytrain_fx.forecast.sweep import Sweep, sweep_of
from hytrain_fx.forecast.systems import OURS, SYSTEMS, Case, Row
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.progress import Tell, untold


@dataclass(frozen=True)
class Report:
    """The systems compared on one shape, device and micro-batch, and the chosen plan.

    `hidden_from_tokens` maps a discipline to the micro-batch from which on all updates of equal
    layers are hidden (R c / 6 and so on); `largest_params` what fits beside these activations,
    `capacities` by layers and by batch; `equal_layers` the closed form for as many equal layers and
    its sensitivities. `changes` tells what our plan takes with one thing changed. `profile` is what
    all was predicted from; `sweep` is empty where none was wanted.
    """

    model: str
    params: int
    device: DeviceSpec
    tokens: int
    counted: Counted
    sequence: int
    recompute: bool
    budget_bytes: int
    compute_us: float
    rows: tuple[Row, ...]
    hidden_from_tokens: dict[str, float]
    largest_params: dict[str, float]
    capacities: tuple[Capacity, ...]
    equal_layers: dict[str, float]
    changes: tuple[Change, ...]
    plan: Plan
    profile: Profile
    sweep: Sweep

    @property
    def ours(self) -> Row:
        """The row of the chosen plan."""
        return next(row for row in self.rows if row.system == OURS)

    def to_json(self) -> str:
        """All figures as JSON text."""
        return json.dumps(asdict(self), indent=1)


def report(
    model: ModelShape | str | Path | Mapping[str, Any],
    device: DeviceSpec | str | Path,
    tokens: int,
    *,
    sequence: int | None = None,
    recompute: bool = False,
    budget_bytes: int | None = None,
    sweep: bool = True,
    autocast: bool = False,
    tell: Tell = untold,
) -> Report:
    """Compare the systems for one micro-batch of `tokens` tokens.

    model         a shape, a registered name, a config.json (path or content), or
                  package.module:factory
    device        a spec, a known name, or a TOML or JSON file
    budget_bytes  device memory for resident optimizer states, None = what the device has left, for
                  streamed gradients too
    sweep         with other micro-batches and sizes
    autocast      the weights are fp32 and run under autocast to bf16 (`autocast_copies`), instead
                  of 16-bit ones with fp32 masters
    tell          is told how far the sweep is

    Raises ConfigError for an unknown model or device, PlanError for a negative budget.
    """
    shape = model if isinstance(model, ModelShape) else find_model(model)
    if autocast:
        shape = replace(shape, name=f"{shape.name}, fp32 under autocast", autocast=True)
    spec = device if isinstance(device, DeviceSpec) else find_device(device)
    sequence = min(tokens, shape.context) if sequence is None else sequence
    case = Case.of(shape, spec, tokens, sequence, recompute, budget_bytes)
    profile, budget = case.profile, case.budget_bytes
    if budget < 0:
        raise PlanError(f"found a budget of {budget} bytes for states on the device, expected >= 0")
    plans = {system.name: case.plan_of(system) for system in SYSTEMS}
    rows = tuple(case.row_of(system, plans[system.name]) for system in SYSTEMS)
    return Report(
        shape.name, shape.params, spec, tokens, shape.counted, sequence, recompute, budget, profile.forward_us + profile.backward_us, rows,
        _hidden_from_tokens(profile, spec, recompute),
        largest_params(spec, activation_bytes(shape, tokens, recompute), shape.autocast),
        capacities(shape, spec, tokens, sequence, recompute), _equal_layers(profile), changes(case), plans[OURS], profile,
        sweep_of(case, tell) if sweep else Sweep())


def _hidden_from_tokens(profile: Profile, device: DeviceSpec, recompute: bool) -> dict[str, float]:
    """R c / f, the micro-batch from which on updates are hidden.

    f is FLOPs a parameter and token between gradient and next use, c seconds an update takes
    (cores, or host memory).
    """
    forward, backward = 2, 6 if recompute else 4
    flops_of = {"waits per layer": forward + backward, "one barrier before the forward": backward, "updates after the backward": forward}
    rate, moved = bytes_per_us(profile), sum(map(cpu_bytes, profile.units))
    update_us = max(profile.cpu_update_us, moved / rate if rate else 0.0)
    return {name: 1e-6 * update_us / profile.params * device.achieved_flops / flops for name, flops in flops_of.items()}


def _equal_layers(profile: Profile) -> dict[str, float]:
    point = (len(profile.units), profile.backward_us, profile.cpu_update_us, profile.alpha)
    slopes = uniform_sensitivities(*point)
    values = {"t_bwd": profile.backward_us, "t_cpu": profile.cpu_update_us, "alpha": profile.alpha}
    moves = {f"k_per_percent_{name}": slopes[name] * value / 100 for name, value in values.items()}
    return {"n": float(point[0]), "k": uniform_k(*point), **moves}
