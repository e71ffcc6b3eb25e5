"""Bytes by tier for one way of placing the states, and the largest model that still fits that way.

    per parameter, 16-bit training      device                                   host
    updated on the device               2 weight + 2 gradient + 12 states         -
    updated by the CPU                  2 weight (gradients pass through a ring)  12 states + 2 slot
    streamed                            2 weight + 2 gradient (+ staging slots)   12 states

With several ranks each GPU has all weights. Gradients that stay, states and slots are of the rank's
shards, and gradients of two units are there whole on their way to the other ranks. The host holds
those of all its ranks.

Fp32 weights under autocast, of which the device has bf16 copies: gradients that stay on the device
are fp32, and so are slots.

With moments in bf16 states take 8 bytes instead of 12. The staging slots stay as they are: their
arrays are fp32.

Streamed weights: those that the CPU updates are half of their masters on the host, and share a few
slots on the device. Weights in shards: each GPU has its shards, or the host has those that the CPU
updates; slots are for whole units, and one unit is on its way from the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hytrain_fx.cost_model.fetches import weight_slots_bytes
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.ranks import ONE_RANK, Ranks
from hytrain_fx.forecast.shapes import ModelShape
from hytrain_fx.ir.limits import CHUNK_PARAMS, FP32_BYTES, HALF_BYTES, STAGING_SLOTS, TRANSIT_BYTES, UNITS_AHEAD
from hytrain_fx.ir.states import ADAMW_DEFAULT, STATE_BYTES_PER_PARAM

WEIGHT_BYTES = GRAD_BYTES = SLOT_BYTES = HALF_BYTES
AUTOCAST_GRAD_BYTES = FP32_BYTES  # at rest on the device and in a slot; on the link 2
# share of the device's memory; the rest is context, fragmentation and workspaces
DEVICE_SHARE = 0.95
# Of the staging slots: the engine has an fp32 array there for master and each state, whatever the
# states' dtype (`staging_shape`).
STAGING_BYTES_PER_PARAM = ADAMW_DEFAULT.tensors * FP32_BYTES
_BUCKETS = 2  # units whose whole gradients are on their way to the other ranks at once
HOST_SHARE = 0.85  # share of the host's memory; the rest is the system and the process


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the device and on the host.

    On the device are weights, gradients, states and activations; on the host states and slots.
    Those of the host are of all ranks that share it.
    """

    weights_bytes: int
    gradients_bytes: int
    gpu_states_bytes: int
    activations_bytes: int
    host_states_bytes: int
    host_slots_bytes: int

    @property
    def device_bytes(self) -> int:
        """All of the device."""
        return self.weights_bytes + self.gradients_bytes + self.gpu_states_bytes + self.activations_bytes

    @property
    def host_bytes(self) -> int:
        """All of the host."""
        return self.host_states_bytes + self.host_slots_bytes

    def fits(self, device: DeviceSpec) -> bool:
        """Whether both tiers hold it, with a margin on each."""
        return self.device_fits(device) and self.host_fits(device)

    def device_fits(self, device: DeviceSpec) -> bool:
        """Whether the device holds its part, with a margin."""
        return self.device_bytes <= DEVICE_SHARE * device.memory_bytes

    def host_fits(self, device: DeviceSpec) -> bool:
        """Whether the host holds its part, with a margin."""
        return self.host_bytes <= HOST_SHARE * device.host_memory_bytes


def activation_bytes(shape: ModelShape, tokens: int, recompute: bool = False) -> int:
    """What the forward keeps for the backward.

    With `recompute` each layer's input, and the inside of one layer at a time.
    """
    return sum(kept_bytes(shape, tokens, recompute)) + recomputed_bytes(shape, tokens, recompute)


def ring_bytes(shape: ModelShape, streams: bool, ranks: Ranks = ONE_RANK) -> int:
    """Device memory for gradients on their way to the host.

    Less where states are streamed: their staging slots take the rest.
    """
    staging = STAGING_SLOTS * CHUNK_PARAMS * STAGING_BYTES_PER_PARAM if streams else 0
    return min(TRANSIT_BYTES - staging, 2 * GRAD_BYTES * ranks.shard(shape.params))


def bucket_bytes(shape: ModelShape, ranks: Ranks) -> int:
    """Device memory for whole gradients on their way to the other ranks; 0 for one rank."""
    return _BUCKETS * GRAD_BYTES * max(u.params for u in shape.units) if ranks.count > 1 else 0


def footprint(
    shape: ModelShape, tokens: int, k: int, recompute: bool = False, streamed_params: int = 0, ranks: Ranks = ONE_RANK
) -> Footprint:
    """Bytes when the first `k` units are updated on the device and of the others `streamed_params`
    are streamed, the rest is updated by the CPU. Staging slots count as states on the device. With
    several ranks `streamed_params` are one rank's.

    Gradients and activations are those of the moment in the backward when most of the device is in
    use: activations go as gradients come, so the two are never there in full together.
    """
    shards = unit_shards(shape, ranks)
    on_device, on_host = sum(shards[:k]), sum(shards[k:])
    by_cpu = on_host - streamed_params
    staging_bytes = STAGING_SLOTS * CHUNK_PARAMS * STAGING_BYTES_PER_PARAM if streamed_params else 0
    state_bytes = shape.state_bytes_per_param
    slot_bytes = AUTOCAST_GRAD_BYTES if shape.autocast else SLOT_BYTES
    gradients, activations = _fullest(shape, tokens, k, recompute, streamed_params / max(on_host, 1), shards)
    in_transit = (ring_bytes(shape, streamed_params > 0, ranks) if by_cpu else 0) + bucket_bytes(shape, ranks)
    at_home = shape.params if shape.weights == "resident" else on_device + (streamed_params if shape.on_host else on_host)
    weights = WEIGHT_BYTES * at_home + _slots_bytes(shape, k, streamed_params / max(on_host, 1))
    return Footprint(weights, gradients + in_transit, state_bytes * on_device + staging_bytes,
                     activations + recomputed_bytes(shape, tokens, recompute), state_bytes * on_host * ranks.gpus,
                     slot_bytes * by_cpu * ranks.gpus)


def states_budget_bytes(
    shape: ModelShape, device: DeviceSpec, tokens: int, recompute: bool = False, ranks: Ranks = ONE_RANK
) -> int:  # fmt: skip
    """Device memory left for states.

    The gradients of as many leading units as fit there fit, too.
    """
    limit = DEVICE_SHARE * device.memory_bytes
    # streamed weights come back to the device with their states
    with_weights = shape.state_bytes_per_param + (WEIGHT_BYTES if shape.on_host else 0)
    of_states = [0, *accumulate(with_weights * shard for shard in unit_shards(shape, ranks))]
    # What solves k counts streamed gradients as they travel: those of autocast are wider, in the
    # worst case all of them.
    limit -= (_grad_bytes(shape) - GRAD_BYTES) * ranks.shard(shape.params)
    left = [limit - footprint(shape, tokens, k, recompute, ranks=ranks).device_bytes for k in range(len(of_states))]
    k = next((k for k, free in enumerate(left) if free < 0), len(left)) - 1
    if k < 0:
        return 0
    budget = of_states[k] + left[k]
    return int(budget if k + 1 == len(left) else min(budget, of_states[k + 1] - 1))


def _slots_bytes(shape: ModelShape, k: int, streamed_share: float) -> int:
    """Slots for the weights of units from `k` on, less what is on the device with its states.

    Of weights in shards for all units, and a bucket of the largest.
    """
    if shape.weights == "resident":
        return 0
    if shape.in_shards:
        sizes = {u.index: WEIGHT_BYTES * u.params for u in shape.units}
        return weight_slots_bytes(sizes, UNITS_AHEAD) + max(sizes.values())
    return weight_slots_bytes({u.index: round(WEIGHT_BYTES * (1 - streamed_share) * u.params) for u in shape.units[k:]}, UNITS_AHEAD)


def unit_shards(shape: ModelShape, ranks: Ranks) -> list[int]:
    """Elements of each unit that one rank updates."""
    return ranks.shards([u.params for u in shape.units])


def _grad_bytes(shape: ModelShape) -> int:
    """Bytes of a gradient that stays on the device until its update."""
    return AUTOCAST_GRAD_BYTES if shape.autocast else GRAD_BYTES


def kept_bytes(shape: ModelShape, tokens: int, recompute: bool) -> list[int]:
    """What each unit keeps until its backward."""
    return [2 * (u.output_values if recompute and u.attention_width else u.saved_values) * tokens for u in shape.units]


def recomputed_bytes(shape: ModelShape, tokens: int, recompute: bool) -> int:
    """The inside of one layer at a time."""
    return max((2 * u.saved_values * tokens for u in shape.units if u.attention_width), default=0) if recompute else 0


def _fullest(
    shape: ModelShape, tokens: int, k: int, recompute: bool, streamed_share: float, shards: Sequence[int]
) -> tuple[int, int]:  # fmt: skip
    """Gradients that stay on the device, and activations, at the moment when their sum is largest.

    That moment is the end of some unit's backward.
    """
    each_kept, grad_bytes = kept_bytes(shape, tokens, recompute), _grad_bytes(shape)
    gradients, activations = 0, sum(each_kept)
    fullest = (gradients, activations)  # the backward begins
    most = activations
    for unit in reversed(range(len(shards))):
        gradients += int(grad_bytes * shards[unit] * (1.0 if unit < k else streamed_share))
        if gradients + activations > most:
            fullest, most = (gradients, activations), gradients + activations
        activations -= each_kept[unit]
    return fullest


def largest_params(
    device: DeviceSpec, activations_bytes: int, autocast: bool = False, ranks: Ranks = ONE_RANK,
    state_bytes: int = STATE_BYTES_PER_PARAM, streamed: bool = False, sharded: bool = False,
) -> dict[str, float]:  # fmt: skip
    """The most parameters each way of placing states holds next to so many bytes of activations.

    What gradients and weights travel through is left out. `state_bytes` are master and states of a
    parameter; `streamed` weights that the CPU updates rest on the host. With `sharded` each rank
    has its part of them alone.

    "device": all on the device. "host": all states on the host. "split": the host full, the rest on
    the device.
    """
    device_bytes = max(DEVICE_SHARE * device.memory_bytes - activations_bytes, 0.0)
    on_host_bytes = state_bytes + (AUTOCAST_GRAD_BYTES if autocast else SLOT_BYTES)
    host_params = ranks.nodes * HOST_SHARE * device.host_memory_bytes / on_host_bytes
    weight_bytes = WEIGHT_BYTES / ranks.count if sharded else WEIGHT_BYTES
    resident_bytes = weight_bytes + ((AUTOCAST_GRAD_BYTES if autocast else GRAD_BYTES) + state_bytes) / ranks.count
    there_bytes = 0 if streamed else weight_bytes  # on the device, of what the CPU updates
    on_host = min(host_params, device_bytes / there_bytes) if there_bytes else host_params * (device_bytes > 0)
    return {
        "device": device_bytes / resident_bytes,
        "host": on_host,
        "split": on_host + max(device_bytes - there_bytes * on_host, 0.0) / resident_bytes,
    }
