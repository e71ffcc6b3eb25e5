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

from hytrain_fx.config import Moments, Weights, in_shards
from hytrain_fx.cost_model.equation import uniform_k, uniform_sensitivities
from hytrain_fx.cost_model.host_memory import bytes_per_us, cpu_bytes, streamed_bytes
from hytrain_fx.errors import ConfigError, PlanError
from hytrain_fx.forecast.capacity import Capacity, capacities
from hytrain_fx.forecast.changes import Change, changes
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.memory import activation_bytes, footprint, largest_params
from hytrain_fx.forecast.models import find_model
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.peers import Peer, peers_of
from hytrain_fx.forecast.ranks import ONE_RANK, Ranks
from hytrain_fx.forecast.shapes import Counted, ModelShape
from hytrain_fx.forecast.sharded_weights import ShardedWeights, sharded_weights
from hytrain_fx.forecast.streamed_weights import StreamedWeights, streamed_weights
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

    With several `ranks` each has a micro-batch of `tokens`; plan, profile and budget are of one of
    them, and `peers` has other ways to train on several GPUs.

    With `moments` "bf16" AdamW's two states rest in 16 bits in all ways that are this library's,
    with `streamed` the weights that the CPU updates rest on the host, and with `sharded` each rank
    has its shards of the weights alone.
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
    ranks: Ranks = ONE_RANK
    peers: tuple[Peer, ...] = ()
    moments: Moments = "fp32"
    streamed: StreamedWeights | None = None
    sharded: ShardedWeights | None = None

    @property
    def machine(self) -> str:
        """The device, and how many of it."""
        return self.device.name if self.ranks.count == 1 else f"{self.device.name}, {self.ranks.words}"

    @property
    def counted_per_step(self) -> int:
        """Tokens or samples of all ranks in a step."""
        return self.tokens * self.ranks.count

    @property
    def ours(self) -> Row:
        """The row of the chosen plan."""
        return next(row for row in self.rows if row.system == OURS)

    def to_json(self) -> str:
        """All figures as JSON text; `moments` where not fp32, `streamed` and `sharded` where so."""
        figures = asdict(self)
        for name, usual in (("moments", "fp32"), ("streamed", None), ("sharded", None)):
            if figures[name] == usual:
                del figures[name]
        return json.dumps(figures, indent=1)


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
    ranks: Ranks = ONE_RANK,
    moments: Moments | None = None,
    weights: Weights = "resident",
    tell: Tell = untold,
) -> Report:
    """Compare the systems for one micro-batch of `tokens` tokens on each GPU.

    model         a shape, a registered name, a config.json (path or content), or
                  package.module:factory
    device        a spec, a known name, or a TOML or JSON file
    budget_bytes  device memory for resident optimizer states, None = what the device has left, for
                  streamed gradients too
    sweep         with other micro-batches and sizes
    autocast      the weights are fp32 and run under autocast to bf16 (`autocast_copies`), instead
                  of 16-bit ones with fp32 masters
    ranks         how many GPUs of how many machines train it; a host of fewer GPUs is enlarged
    moments       in what AdamW's two states rest, "fp32" or "bf16" (`compile(..., moments=)`);
                  None: as the shape says
    weights       where 16-bit weights rest that the CPU updates (`compile(..., weights=)`). "auto":
                  on the device where they fit beside this batch's activations, which `compile`
                  does not know
    tell          is told how far the sweep is

    Raises ConfigError and PlanError as `case_of` does.
    """
    case = case_of(model, device, tokens, sequence=sequence, recompute=recompute, budget_bytes=budget_bytes, autocast=autocast, ranks=ranks,
                   moments=moments, weights=weights)
    shape, spec, sequence, profile = case.shape, case.device, case.sequence, case.profile
    plans = {system.name: case.plan_of(system) for system in SYSTEMS}
    rows = tuple(case.row_of(system, plans[system.name]) for system in SYSTEMS)
    return Report(
        shape.name, shape.params, spec, tokens, shape.counted, sequence, recompute, case.budget_bytes,
        profile.forward_us + profile.backward_us, rows, _hidden_from_tokens(case),
        largest_params(spec, activation_bytes(shape, tokens, recompute), shape.autocast, ranks, shape.state_bytes_per_param,
                       shape.on_host, shape.in_shards),
        capacities(shape, spec, tokens, sequence, recompute, ranks), _equal_layers(profile), changes(case), plans[OURS], profile,
        sweep_of(case, tell) if sweep else Sweep(), ranks, peers_of(case, rows) if ranks.count > 1 else (), shape.moments,
        streamed_weights(case) if shape.weights == "streamed" else None, sharded_weights(case) if shape.in_shards else None)


def case_of(
    model: ModelShape | str | Path | Mapping[str, Any],
    device: DeviceSpec | str | Path,
    tokens: int,
    *,
    sequence: int | None = None,
    recompute: bool = False,
    budget_bytes: int | None = None,
    autocast: bool = False,
    ranks: Ranks = ONE_RANK,
    moments: Moments | None = None,
    weights: Weights = "resident",
) -> Case:
    """The case that `report` is about; its arguments are those of `report`.

    Raises ConfigError for an unknown model or device, for autocast with several ranks, for streamed
    weights with either and for sharded ones of one rank, PlanError for a negative budget,
    UnsupportedError for other `moments`.
    """
    if in_shards(weights) and ranks.count == 1:
        raise ConfigError(f'found weights="{weights}" on one GPU, expected several, of a machine or of several machines: shards are of '
                          "several ranks")
    if weights == "streamed" and (autocast or ranks.count > 1):
        of = "of fp32 under autocast" if autocast else f"on {ranks.words}"
        raise ConfigError(f"found streamed weights {of}, expected 16-bit weights and one GPU: no others rest on the host")
    if autocast and ranks.count > 1:
        raise ConfigError(f"found autocast on {ranks.words}, expected 16-bit weights or one GPU: of sharded parameters no 16-bit copies "
                          "are made")
    shape = model if isinstance(model, ModelShape) else find_model(model)
    if autocast:
        shape = replace(shape, name=f"{shape.name}, fp32 under autocast", autocast=True)
    spec = (device if isinstance(device, DeviceSpec) else find_device(device)).in_machine_of(ranks)
    shape = replace(shape, moments=moments or shape.moments, weights="resident")
    too_large = not autocast and ranks.count == 1 and not footprint(shape, tokens, 0, recompute).device_fits(spec)
    if weights == "streamed" or (weights == "auto" and too_large):
        shape = replace(shape, name=f"{shape.name}, weights on the host", weights="streamed")
    if in_shards(weights):
        shape = replace(shape, name=f"{shape.name}, weights in shards{' on the host' * (weights == 'sharded_host')}", weights=weights)
    if shape.moments != "fp32":
        shape = replace(shape, name=f"{shape.name}, moments in {shape.moments}")
    sequence = min(tokens, shape.context) if sequence is None else sequence
    case = Case.of(shape, spec, tokens, sequence, recompute, budget_bytes, ranks)
    if case.budget_bytes < 0:
        raise PlanError(f"found a budget of {case.budget_bytes} bytes for states on the device, expected >= 0")
    return case


def _hidden_from_tokens(case: Case) -> dict[str, float]:
    """R c / f, the micro-batch from which on updates are hidden.

    f is FLOPs a parameter and token between gradient and next use, c seconds an update takes
    (cores, or host memory). With several ranks c is what their part of the updates takes each of
    them, and there is a row for states that are all streamed (the link, or host memory).
    """
    profile = case.profile
    forward, backward = 2, 6 if case.recompute else 4
    flops_of = {"waits per layer": forward + backward, "one barrier before the forward": backward, "updates after the backward": forward}
    rate, moved = bytes_per_us(profile), sum(map(cpu_bytes, profile.units))
    update_us = max(profile.cpu_update_us, moved / rate if rate else 0.0)

    def tokens(update_us: float, flops: int) -> float:
        return 1e-6 * update_us / case.shape.params * case.device.achieved_flops / flops

    found = {name: tokens(update_us, flops) for name, flops in flops_of.items()}
    if case.ranks.count > 1:
        streamed, link_us = sum(map(streamed_bytes, profile.units)), max(sum(u.stream_in_us for u in profile.units),
                                                                         sum(u.stream_out_us for u in profile.units))
        found["waits per layer, all streamed"] = tokens(max(link_us, streamed / rate if rate else 0.0), forward + backward)
    return found


def _equal_layers(profile: Profile) -> dict[str, float]:
    point = (len(profile.units), profile.backward_us, profile.cpu_update_us, profile.alpha)
    slopes = uniform_sensitivities(*point)
    values = {"t_bwd": profile.backward_us, "t_cpu": profile.cpu_update_us, "alpha": profile.alpha}
    moves = {f"k_per_percent_{name}": slopes[name] * value / 100 for name, value in values.items()}
    return {"n": float(point[0]), "k": uniform_k(*point), **moves}
