"""An offline report: what a model would cost on a machine under each way of placing the updates.

It needs neither the model's weights nor the machine. Figures are predictions from `device.py`'s rates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hytrain_fx.cost_model.device import DeviceSpec, analytic_profile, find_device
from hytrain_fx.cost_model.discipline import Barrier, Discipline
from hytrain_fx.cost_model.equation import uniform_k, uniform_sensitivities
from hytrain_fx.cost_model.figures import bytes_text, count_text, time_text
from hytrain_fx.cost_model.memory import Footprint, activation_bytes, footprint, largest_params, states_budget_bytes
from hytrain_fx.cost_model.planner import GUARD, Rule, Stream, plan
from hytrain_fx.cost_model.shapes import ModelShape, read_shape
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile


@dataclass(frozen=True, slots=True)
class System:
    """One way to run: which rule or fixed share of units decides k, where the forward waits, and whether states may be streamed."""

    name: str
    rule: Rule | None
    share: float
    barrier: Barrier
    stream: Stream = 0.0


SYSTEMS = (
    System("ZeRO-Offload, no overlap", None, 0.0, "zero_offload"),
    System("CoTrain k, one barrier", "cotrain", 0.0, "before_forward"),
    System("HyTrainDNN k, one barrier", "seed", 0.0, "before_forward"),
    System("HyTrainDNN k, waits per layer", "seed", 0.0, "none"),
    System("windows, waits per layer", "windowed", 0.0, "none"),
    System("windows, states streamed too", "windowed", 0.0, "none", "auto"),
    System("all on the device", None, 1.0, "none"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What one system is predicted to take. `fits` tells whether both tiers hold `memory`; `stream_share` is of what is not resident."""

    system: str
    k: int
    stream_share: float
    step_us: float
    stall_us: float
    gpu_update_us: float
    gpu_idle_share: float
    memory: Footprint
    fits: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The systems compared on one shape, device and micro-batch, and the chosen plan.

    `hidden_from_tokens` maps a discipline to the micro-batch from which on all updates of equal layers are hidden (R c / 6 and so
    on); `largest_params` what fits; `equal_layers` the closed form for as many equal layers and its sensitivities.
    """

    model: str
    params: int
    device: str
    source: str
    tokens: int
    sequence: int
    recompute: bool
    budget_bytes: int
    compute_us: float
    rows: tuple[Row, ...]
    hidden_from_tokens: dict[str, float]
    largest_params: dict[str, float]
    equal_layers: dict[str, float]
    plan: Plan

    def to_json(self) -> str:
        """All figures as JSON text."""
        return json.dumps(asdict(self), indent=1)

    def to_markdown(self) -> str:
        """The report as Markdown text."""
        parts = (self._head(), self._steps_table(), self._memory_table(), self._limits(), self._placement())
        return "\n\n".join(parts) + "\n"

    def _head(self) -> str:
        return (f"# {self.model} on {self.device}\n\n"
                f"{count_text(self.params)} parameters, micro-batch of {self.tokens} tokens in sequences of {self.sequence}, "
                f"{'with' if self.recompute else 'no'} recomputation, {bytes_text(self.budget_bytes)} of device memory for "
                f"optimizer states. Predicted, not measured. "
                f"Forward and backward alone take {time_text(self.compute_us)}.\n\nRates: {self.source}.")

    def _steps_table(self) -> str:
        heads = ("system", "k", "streamed", "step", "of compute", "waits", "device updates", "device idle", "fits")
        lines = [_line(heads), "|---" * len(heads) + "|"]
        lines += [_line((r.system, str(r.k), f"{r.stream_share:.0%}", time_text(r.step_us), f"{r.step_us / self.compute_us:.2f}",
                         time_text(r.stall_us), time_text(r.gpu_update_us), f"{r.gpu_idle_share:.0%}", "yes" if r.fits else "no"))
                  for r in self.rows]
        notes = dict.fromkeys(f"- {row.system}: {note}" for row in self.rows for note in row.notes)
        return "\n".join(lines) + ("\n\n" + "\n".join(notes) if notes else "")

    def _memory_table(self) -> str:
        heads = ("system", "weights", "gradients", "states", "activations", "device", "host states", "host slots", "host")
        lines = [_line(heads), "|---" * len(heads) + "|"]
        for row in self.rows:
            m = row.memory
            figures = (m.weights_bytes, m.gradients_bytes, m.gpu_states_bytes, m.activations_bytes, m.device_bytes,
                       m.host_states_bytes, m.host_slots_bytes, m.host_bytes)
            lines.append(_line((row.system, *map(bytes_text, figures))))
        return "\n".join(lines)

    def _limits(self) -> str:
        hidden = ", ".join(f"{count_text(tokens)} ({name})" for name, tokens in self.hidden_from_tokens.items())
        largest = ", ".join(f"{count_text(params)} ({name})" for name, params in self.largest_params.items())
        e = self.equal_layers
        return (f"All CPU updates of equal layers are hidden from this many tokens in a micro-batch on: {hidden}.\n\n"
                f"Most parameters that fit beside these activations: {largest}.\n\n"
                f"{e['n']:.0f} equal layers would balance at k = {e['k']:.1f}; 1% more backward time moves k by "
                f"{e['k_per_percent_t_bwd']:+.2f}, "
                f"1% more CPU update time by {e['k_per_percent_t_cpu']:+.2f}, 1% more alpha by {e['k_per_percent_alpha']:+.3f}.")

    def _placement(self) -> str:
        lines = [f"## Placement by windows, k = {self.plan.k}", ""]
        return "\n".join(lines + [f"- {row.unit} {row.unit_name}: {row.reason}" for row in self.plan.rows])


def report(
    model: ModelShape | str | Path | Mapping[str, Any],
    device: DeviceSpec | str | Path,
    tokens: int,
    *,
    sequence: int | None = None,
    recompute: bool = False,
    budget_bytes: int | None = None,
    guard: float = GUARD,
) -> Report:
    """Compare the systems for one micro-batch of `tokens` tokens.

    model         a shape, a registered name, or a config.json (path or content)
    device        a spec, a known name, or a JSON file
    budget_bytes  device memory for resident optimizer states, None = what the device has left, for streamed gradients too

    Raises ConfigError for an unknown model or device, PlanError for a negative budget.
    """
    shape = model if isinstance(model, ModelShape) else read_shape(model)
    spec = device if isinstance(device, DeviceSpec) else find_device(device)
    sequence = min(tokens, shape.context) if sequence is None else sequence
    profile = analytic_profile(shape, spec, tokens, recompute, sequence=sequence)
    budget = states_budget_bytes(shape, spec, tokens, recompute) if budget_bytes is None else budget_bytes
    if budget < 0:
        raise PlanError(f"found a budget of {budget} bytes for states on the device, expected >= 0")
    plans = {system.name: _plan_of(system, profile, budget, guard, budget_bytes is None) for system in SYSTEMS}
    rows = tuple(_row(system, plans[system.name], shape, spec, tokens, recompute) for system in SYSTEMS)
    chosen = next(plans[system.name] for system in SYSTEMS if system.stream == "auto")
    return Report(
        shape.name, shape.params, spec.name, spec.source, tokens, sequence, recompute, budget,
        profile.forward_us + profile.backward_us, rows, _hidden_from_tokens(spec, recompute),
        largest_params(spec, activation_bytes(shape, tokens, recompute)), _equal_layers(profile), chosen)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plan_of(system: System, profile: Profile, budget_bytes: int, guard: float, counts_streamed: bool) -> Plan:
    discipline = Discipline(barrier=system.barrier)
    if system.rule is None:  # a system without a choice: it is shown even where it does not fit
        return plan(profile, k=round(system.share * len(profile.units)), discipline=discipline)
    return plan(profile, rule=system.rule, stream=system.stream, budget_bytes=budget_bytes, budget_counts_streamed=counts_streamed,
                guard=guard, discipline=discipline)


def _row(system: System, plan: Plan, shape: ModelShape, device: DeviceSpec, tokens: int, recompute: bool) -> Row:
    streamed = plan.numel(Placement.STREAM)
    memory = footprint(shape, tokens, plan.k, recompute, streamed)
    share = streamed / max(plan.numel(Placement.CPU) + streamed, 1)
    p = plan.predicted
    return Row(system.name, plan.k, share, p["step_us"], p["stall_us"], p["gpu_update_us"], p["gpu_idle_share"], memory,
               memory.fits(device), tuple(note for note in plan.notes if note.startswith("capped")))


def _hidden_from_tokens(device: DeviceSpec, recompute: bool) -> dict[str, float]:
    """R c / f: f FLOPs a parameter and token run between gradient and next use, c seconds an update takes."""
    forward, backward = 2, 6 if recompute else 4
    flops_of = {"waits per layer": forward + backward, "one barrier before the forward": backward, "updates after the backward": forward}
    return {name: device.achieved_flops / device.cpu_update_params_per_s / flops for name, flops in flops_of.items()}


def _equal_layers(profile: Profile) -> dict[str, float]:
    point = (len(profile.units), profile.backward_us, profile.cpu_update_us, profile.alpha)
    slopes = uniform_sensitivities(*point)
    values = {"t_bwd": profile.backward_us, "t_cpu": profile.cpu_update_us, "alpha": profile.alpha}
    moves = {f"k_per_percent_{name}": slopes[name] * value / 100 for name, value in values.items()}
    return {"n": float(point[0]), "k": uniform_k(*point), **moves}
