"""What a row is thought to take of the device and of the host, before it runs, and what fits.

Ours is what `hytrain-fx plan` and `report` say (`hytrain_fx.forecast`). Of other ways it is where a
search begins, by bytes a parameter:

                    device                                  host
    all_gpu         2 + 12 + 4 at the update: all           -
                    gradients become fp32 there
    zero_offload    2, gradients pass through buckets       16: fp32 weights, moments, gradients,
                                                            as DeepSpeed's documentation says
    torchao         4 + 2: fp32 weights, bf16 copies for    16: the same
                    the backward
    zero_infinity   gathered weights and gradients of a     18: 16-bit weights too
                    few layers
    fsdp2_offload   the same, in fp32                       16: fp32 weights, moments, gradients

https://deepspeed.readthedocs.io/en/latest/memory.html (ZeRO-2, offload).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from benchmarks import llama
from benchmarks.case import Case
from benchmarks.own_modes import options_of
from hytrain_fx.forecast.capacity import WAYS
from hytrain_fx.forecast.capacity import fits as fits_way
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.memory import DEVICE_SHARE, HOST_SHARE, activation_bytes, footprint
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.report import case_of
from hytrain_fx.forecast.shapes import ModelShape, read_shape
from hytrain_fx.forecast.systems import OUR_SYSTEM, Row
from hytrain_fx.ir.limits import FP32_BYTES, HALF_BYTES
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM

OTHERS_HOST_BYTES = 4 * FP32_BYTES
_PLACES_STATES = ("k", "plan", "stream", "planner")  # options whose plan is not the one that `plan` prints
MOST = 1 << 16


@dataclass(frozen=True)
class Estimate:
    """Bytes on the device and on the host.

    Ours has shares 0..1 of the parameters, too: those whose states are on the device, and those
    that are streamed.
    """

    device_bytes: float
    host_bytes: float
    on_device: float | None = None
    streamed: float | None = None


def spec_of(name: str | None) -> DeviceSpec:
    """A known device or a device file, or this machine's memory with the rates of a known device.

    Raises ConfigError. Only where ours places states do rates matter for memory.
    """
    spec = find_device(name or "h200")
    if name is not None or not torch.cuda.is_available():
        return spec
    return replace(spec, name=torch.cuda.get_device_name(), memory_bytes=torch.cuda.get_device_properties(0).total_memory,
                   host_memory_bytes=psutil.virtual_memory().total)


def capped(spec: DeviceSpec, case: Case) -> DeviceSpec:
    """The device with no more memory than the case may take."""
    caps = {"memory_bytes": case.device_memory_gb, "host_memory_bytes": case.host_memory_gb}
    return replace(spec, **{name: min(int(1e9 * gb), getattr(spec, name)) for name, gb in caps.items() if gb is not None})


def shape_of(case: Case) -> ModelShape:
    """The cost model's shape of a Llama size. Raises CannotRun for another size."""
    keys: dict[str, Any] = llama.shape_of(case.size)
    shape = read_shape({"model_type": "llama", "_name_or_path": case.size, "max_position_embeddings": case.sequence,
                        "num_key_value_heads": keys["num_attention_heads"], **keys})
    return replace(shape, moments=options_of(case).get("moments") or shape.moments) if case.mode == "ours" else shape


def fits(case: Case, spec: DeviceSpec) -> bool:
    """Whether the row is estimated to train on the device, held to the case's caps.

    Ours: whether the plan that `hytrain-fx plan` prints does. With options that place states as no
    plan does: whether any way of placing them does.
    """
    planned = _planned(case, shape_of(case), capped(spec, case)) if case.mode == "ours" else None
    return holds(case, spec) if planned is None else planned[0].fits


def holds(case: Case, spec: DeviceSpec) -> bool:
    """Whether both memories hold the row, of ours with any way of placing its states.

    They may be on the device, on the host, or split by whole layers; those on the host are all
    updated by the CPU, or all streamed.
    """
    shape, spec = shape_of(case), capped(spec, case)
    if case.mode == "ours":
        return any(fits_way(way, shape, spec, case.batch * case.sequence, case.checkpointing) for way in WAYS)
    of = _of_others(case, shape)
    return of.device_bytes <= DEVICE_SHARE * spec.memory_bytes and of.host_bytes <= HOST_SHARE * spec.host_memory_bytes


def estimate_of(case: Case, spec: DeviceSpec) -> Estimate | None:
    """What the row takes; None for ours with options that place states as no plan does."""
    shape, spec = shape_of(case), capped(spec, case)
    if case.mode != "ours":
        return _of_others(case, shape)
    found = _planned(case, shape, spec)
    if found is None:
        return None
    row, plan = found
    on_device, streamed = (plan.numel(place) / shape.params for place in (Placement.GPU, Placement.STREAM))
    return Estimate(row.memory.device_bytes, row.memory.host_bytes, on_device, streamed)


def _planned(case: Case, shape: ModelShape, spec: DeviceSpec) -> tuple[Row, Plan] | None:
    """What `report` says of ours and the plan that `plan` prints, with all workers as a row has."""
    options = options_of(case)
    if any(name in options for name in _PLACES_STATES):
        return None
    states = options.get("gpu_states", "auto")
    if isinstance(states, float):
        states = int(states * shape.state_bytes_per_param * shape.params)
    asked = case_of(shape, spec, case.batch * case.sequence, sequence=case.sequence, recompute=case.checkpointing,
                    budget_bytes=None if states == "auto" else states)
    asked = replace(asked, all_workers=True)
    plan = asked.plan_of(OUR_SYSTEM)
    return asked.row_of(OUR_SYSTEM, plan), plan


def _of_others(case: Case, shape: ModelShape) -> Estimate:
    tokens, units = case.batch * case.sequence, len(shape.units)
    if case.mode == "zero_offload":
        return Estimate(footprint(shape, tokens, 0, case.checkpointing).device_bytes, OTHERS_HOST_BYTES * shape.params)
    if case.mode == "torchao":
        kept_bytes = activation_bytes(shape, tokens, case.checkpointing)
        return Estimate(kept_bytes + (FP32_BYTES + HALF_BYTES) * shape.params, OTHERS_HOST_BYTES * shape.params)
    if case.mode in ("zero_infinity", "fsdp2_offload"):
        layer_bytes = FP32_BYTES * max(unit.params for unit in shape.units)
        host_bytes = OTHERS_HOST_BYTES + (HALF_BYTES if case.mode == "zero_infinity" else 0)
        return Estimate(activation_bytes(shape, tokens, case.checkpointing) + 3 * layer_bytes, host_bytes * shape.params)
    whole = footprint(shape, tokens, units, case.checkpointing)
    if case.mode == "floor":
        return Estimate(whole.device_bytes - whole.gpu_states_bytes, 0)
    updating = (HALF_BYTES + STATE_BYTES_PER_PARAM + FP32_BYTES) * shape.params  # no activations are left by then
    return Estimate(max(whole.device_bytes, updating), 0)


def estimate_params(case: Case, spec: DeviceSpec) -> int:
    """Parameters of the largest model of N layers of N heads that memory holds; 0: none."""
    def sized(number: int) -> Case:
        return replace(case, size=llama.family_size("w", number))

    number = largest_number(lambda number: holds(sized(number), spec))
    return shape_of(sized(number)).params if number else 0


def largest_number(holds: Callable[[int], bool]) -> int:
    """The largest number up to `MOST` that holds, 0 where none does; smaller ones hold, too."""
    above = 1
    while above < MOST and holds(above):
        above *= 2
    low = above // 2
    while above - low > 1:
        middle = (low + above) // 2
        low, above = (middle, above) if holds(middle) else (low, middle)
    return low
