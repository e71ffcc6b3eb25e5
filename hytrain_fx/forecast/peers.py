"""Ways to train on several GPUs, or a model larger than one, beside this library, on paper.

They are models of the ideas, with the rates, kernels and units of the report's case. Forward,
backward and collectives are passed through unit by unit; what comes after is added. So they are
what each schedule allows, and shorter than what its code takes.

    bytes a parameter, R ranks        each GPU                each host of N ranks, M hosts
    DDP                               16                      -
    FSDP2                             16/R, two units whole   -
    FSDP2, offload                    two units whole         16/M: fp32 weights, gradients, moments
    ZeRO-2, offload                   2                       14/M
    ZeRO-3, offload                   2/R, two units whole    16/M: states, fp32 gradients
    ZeRO-Infinity, CPU                two units whole         20/M: 16-bit weights and gradients too
    pipeline                          16/R                    -

They keep fp32 moments, whatever this library's rest in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hytrain_fx.config import Weights
from hytrain_fx.cost_model.simulate import slowed
from hytrain_fx.forecast.memory import DEVICE_SHARE, HOST_SHARE, activation_bytes, largest_params
from hytrain_fx.forecast.systems import OUR_SYSTEM, OURS, ZERO_OFFLOAD, Case, Row
from hytrain_fx.ir.limits import FP32_BYTES, HALF_BYTES
from hytrain_fx.ir.profile import UnitProfile
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM

# AdamW on fp32 gradients: gradient, weight and moments read, weight and moments written.
_FP32_UPDATE_BYTES = 7 * FP32_BYTES
_RESIDENT_BYTES = 2 * HALF_BYTES + STATE_BYTES_PER_PARAM  # weight, gradient, states
_FP32_BYTES = 4 * FP32_BYTES  # weight, gradient, both moments; or states and an fp32 gradient
_PLACES: dict[Weights, str] = {"resident": "", "sharded": "weights in shards, ", "sharded_host": "shards on the host, "}
_WHOLE_UNITS = 2  # of sharded weights, with their gradients: the one that computes, the next one


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to train on all ranks.

    What a step takes, and what of each GPU and each host; the largest model beside the case's
    activations; how all that was calculated.
    """

    system: str
    step_us: float
    device_bytes: float
    host_bytes: float
    fits: bool
    most_params: float
    how: str


def peers_of(case: Case, rows: Sequence[Row]) -> tuple[Peer, ...]:
    """All ways, ours among them; `rows` are what the case's systems take."""
    paper = _Paper(case)
    return (*_played(case, rows), paper.ddp(), paper.fsdp(), paper.fsdp_offload(), paper.zero_3_offload(), paper.pipeline())


def offloaded_peers(case: Case) -> tuple[Peer, ...]:
    """Ways of others to train on one GPU with all weights and states on the host."""
    paper = _Paper(case)
    return paper.zero_infinity(), paper.fsdp_offload()


def _played(case: Case, rows: Sequence[Row]) -> Iterator[Peer]:
    """Those that the simulator plays: states in shards, weights whole on every GPU or in shards."""
    row_of = {row.system: row for row in rows}
    kept_bytes = activation_bytes(case.shape, case.tokens, case.recompute)
    theirs = largest_params(case.device, kept_bytes, case.shape.autocast, case.ranks)
    for weights, words in _PLACES.items():
        of = case.remade(shape=replace(case.shape, weights=weights))
        hosted = replace(of, given_bytes=0, budget_bytes=0)
        solved = row_of[OURS] if of is case else of.row_of(OUR_SYSTEM, of.plan_of(OUR_SYSTEM))
        on_host = hosted.row_of(OUR_SYSTEM, hosted.plan_of(OUR_SYSTEM))
        ours = largest_params(case.device, kept_bytes, case.shape.autocast, case.ranks, case.shape.state_bytes_per_param, of.shape.on_host,
                              of.shape.in_shards)
        for row, most_params, told in ((solved, ours["split"], "plan solved"), (on_host, ours["host"], "every state on the host")):
            how = f"played: k = {row.k}, {row.stream_share:.0%} of the rest streamed"
            yield _peer_of(row, f"this library, {words}{told}", most_params, how)
    yield _peer_of(row_of[ZERO_OFFLOAD], "ZeRO-2, CPU offload", theirs["host"],
                   "played: backward, gradients to the host, updates, weights back, one after the other")


def _peer_of(row: Row, words: str, most_params: float, how: str) -> Peer:
    return Peer(words, row.step_us, row.memory.device_bytes, row.memory.host_bytes, row.fits, most_params, how)


@dataclass(frozen=True, slots=True)
class Passed:
    """What a pass does for one unit, in this order, in microseconds.

    Its shards come from the host and are gathered, it computes, what it made is reduced, and the
    rank's part goes to the host.
    """

    compute_us: float
    in_us: float = 0.0
    gather_us: float = 0.0
    reduce_us: float = 0.0
    out_us: float = 0.0


def passed_us(units: Iterable[Passed]) -> float:
    """How long a pass over units takes.

    Computing, collectives and copies each way are four lanes, each of which keeps the units' order.
    What a unit needs is asked for when the unit before it begins.
    """
    came_us = lane_us = began_us = done_us = went_us = 0.0
    before = Passed(0.0)
    for unit in units:
        came_us = max(came_us, began_us) + unit.in_us
        gathered_us = max(lane_us, came_us) + unit.gather_us
        lane_us = max(gathered_us, done_us) + before.reduce_us
        went_us = max(went_us, lane_us) + before.out_us
        began_us = max(done_us, gathered_us)
        done_us, before = began_us + unit.compute_us, unit
    lane_us = max(lane_us, done_us) + before.reduce_us
    return max(lane_us, max(went_us, lane_us) + before.out_us)


class _Paper:
    """One case's ways on paper."""

    def __init__(self, case: Case) -> None:
        self._case, self._device, self._ranks = case, case.device, case.ranks
        profile = slowed(case.remade(shape=replace(case.shape, weights="resident")).profile)
        self._forward, self._backward = profile.units, profile.units[::-1]
        self._params = case.shape.params
        self._kept_bytes = activation_bytes(case.shape, case.tokens, case.recompute)
        self._whole_bytes = _WHOLE_UNITS * 2 * HALF_BYTES * max(u.params for u in case.shape.units)

    def ddp(self) -> Peer:
        """Everything on every GPU."""
        backward_us = passed_us(Passed(u.backward_us, reduce_us=2 * u.reduce_scatter_us) for u in self._backward)
        step_us = sum(u.forward_us for u in self._forward) + backward_us + self._device_update_us(self._params)
        return self._peer("DDP, AdamW on every GPU", step_us, _RESIDENT_BYTES, 0.0,
                          "all-reduce beside the backward, then all updates on every GPU")

    def fsdp(self) -> Peer:
        """Weights, gradients and states in shards on the GPUs."""
        step_us = self._gathered_us(0.0, 0.0) + self._device_update_us(self._params / self._ranks.count)
        return self._peer("FSDP2", step_us, _RESIDENT_BYTES / self._ranks.count, 0.0,
                          "weights gathered before forward and backward, one unit ahead; then the shards' updates", self._whole_bytes)

    def fsdp_offload(self) -> Peer:
        """The same with fp32 shards on the host."""
        step_us = self._gathered_us(FP32_BYTES, FP32_BYTES) + self._host_update_us(_FP32_UPDATE_BYTES)
        return self._peer("FSDP2, CPU offload", step_us, 0.0, _FP32_BYTES,
                          "fp32 shards come before each gather and fp32 gradients go beside the backward; then fp32 AdamW by the CPU",
                          self._whole_bytes)

    def zero_3_offload(self) -> Peer:
        """16-bit shards on the GPU, states on the host."""
        back_us = 1e6 * HALF_BYTES * self._params / self._ranks.count / self._device.h2d_bytes_per_s
        step_us = self._gathered_us(0.0, HALF_BYTES) + self._host_update_us(_FP32_UPDATE_BYTES + HALF_BYTES) + back_us
        return self._peer("ZeRO-3, CPU offload", step_us, HALF_BYTES / self._ranks.count, _FP32_BYTES,
                          "gradients go beside the backward; then AdamW by the CPU with a 16-bit copy, then that goes back. "
                          "DeepSpeed's own kernels take longer", self._whole_bytes)

    def zero_infinity(self) -> Peer:
        """Everything on the host, in its memory."""
        step_us = self._gathered_us(HALF_BYTES, HALF_BYTES) + self._host_update_us(_FP32_UPDATE_BYTES + HALF_BYTES)
        return self._peer("ZeRO-Infinity, weights and states on the CPU", step_us, 0.0, _FP32_BYTES + 2 * HALF_BYTES,
                          "16-bit weights come before each forward and backward, one unit ahead, gradients go beside the backward; then "
                          "AdamW by the CPU with a 16-bit copy. DeepSpeed's own kernels take longer", self._whole_bytes)

    def pipeline(self) -> Peer:
        """As many stages as ranks, 1F1B, the same tokens for each GPU."""
        stages, sequence = self._ranks.count, min(self._case.sequence, self._case.tokens)
        batches = max(1, stages * self._case.tokens // sequence)
        compute_us = sum(u.forward_us + u.backward_us for u in self._forward)
        step_us = compute_us * (1 + (stages - 1) / batches) + self._device_update_us(self._params / stages)
        kept_bytes = activation_bytes(self._case.shape, sequence, self._case.recompute) * min(stages, batches) / stages
        return self._peer("pipeline, a stage on every GPU", step_us, _RESIDENT_BYTES / stages, 0.0,
                          f"1F1B with {stages} equal stages and {batches} micro-batches of one sequence: the time of {stages - 1} of them "
                          "is idle; then the stage's updates. Sending activations is left out", kept_bytes - self._kept_bytes)

    def _gathered_us(self, in_bytes: float, out_bytes: float) -> float:
        """Forward and backward with weights that are gathered for each.

        `in_bytes` of each parameter of a shard come from the host before each gather, `out_bytes`
        go there after the reduce-scatter.
        """
        def come_us(u: UnitProfile) -> float:
            return 1e6 * in_bytes * u.params / self._device.h2d_bytes_per_s

        forward_us = passed_us(Passed(u.forward_us, come_us(u), u.all_gather_us) for u in self._forward)
        return forward_us + passed_us(Passed(u.backward_us, come_us(u), u.all_gather_us, u.reduce_scatter_us,
                                             1e6 * out_bytes * u.params / self._device.d2h_bytes_per_s) for u in self._backward)

    def _device_update_us(self, params: float) -> float:
        return self._ranks.skew * 1e6 * params / self._device.gpu_update_params_per_s

    def _host_update_us(self, bytes_per_param: float) -> float:
        """All of a host's shards: by its cores, or as its memory allows."""
        params = self._params / self._ranks.nodes
        by_cores_us = self._ranks.skew * 1e6 * params / self._device.cpu_update_params_per_s
        rate = self._device.host_memory_gb_per_s
        return by_cores_us if rate is None else max(by_cores_us, params * bytes_per_param / (1e3 * rate))

    def _peer(self, name: str, step_us: float, device_bytes: float, host_bytes: float, how: str, more_bytes: float = 0.0) -> Peer:
        """A row from the bytes of each parameter; `more_bytes` are on each GPU besides."""
        fixed_bytes = self._kept_bytes + more_bytes
        host_bytes /= self._ranks.nodes
        usable_bytes = DEVICE_SHARE * self._device.memory_bytes - fixed_bytes
        most = min(max(usable_bytes, 0.0) / device_bytes if device_bytes else math.inf,
                   HOST_SHARE * self._device.host_memory_bytes / host_bytes if host_bytes else math.inf)
        return Peer(name, step_us, fixed_bytes + device_bytes * self._params, host_bytes * self._params,
                    usable_bytes >= 0 and self._params <= most, most if usable_bytes >= 0 else 0.0, how)
