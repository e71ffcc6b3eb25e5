"""What weights on the host cost and save, for one model on one machine with one GPU.

    by tokens    a step with all updates by the CPU, weights on the device and on the host
    free from    tokens from which fetches are hidden: seconds of the link, or of the host's memory,
                 against the FLOPs of the pass that they are hidden behind

                     forward     2 bytes / link        against 2 FLOPs a parameter and token
                     backward    2 bytes / link        against 4, with recomputation 6
                     memory      32 bytes / bandwidth  against both passes

    ways         this library's, with activations recomputed instead, and others' on paper
    machines     the largest model by memory of the GPU and of the host
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hytrain_fx.config import Weights
from hytrain_fx.cost_model.host_memory import bytes_per_us, cpu_bytes
from hytrain_fx.forecast.capacity import capacities, fits, most_layers
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.peers import Peer, offloaded_peers
from hytrain_fx.forecast.sweep import whole_batches
from hytrain_fx.forecast.systems import OUR_SYSTEM, Case, Row
from hytrain_fx.ir.figures import count_text

GPU_GB, HOST_GB = (8, 24, 48, 80, 141), (64, 128, 256, 512)
PUBLISHED = (
    "MegaTrain, which has weights and states on the host too: 120 G parameters on one H200 with 1.5 TB of host memory, and 1.84 times "
    "the throughput of DeepSpeed ZeRO-3 with CPU offload at 14 G (its authors' figures, arXiv:2604.05091; not calculated here).",
)


@dataclass(frozen=True, slots=True)
class AtTokens:
    """One micro-batch, all updates by the CPU: the step with weights on the device and on the host.

    fetch_stall_us    how long the device then stands still while weights come
    """

    tokens: int
    compute_us: float
    resident_us: float
    streamed_us: float
    fetch_stall_us: float


@dataclass(frozen=True, slots=True)
class OfMachine:
    """The largest model of these layers at the case's micro-batch, in parameters.

    Activations are recomputed. 0 = none; None = no layers repeat.
    """

    gpu_gb: int
    host_gb: int
    resident_params: int | None
    streamed_params: int | None


@dataclass(frozen=True, slots=True)
class StreamedWeights:
    """The figures above. `free_from_tokens` maps what hides to what hides it."""

    by_tokens: tuple[AtTokens, ...]
    free_from_tokens: dict[str, float]
    ways: tuple[Peer, ...]
    machines: tuple[OfMachine, ...]


def streamed_weights(case: Case) -> StreamedWeights:
    """For a case whose weights are streamed."""
    return StreamedWeights(tuple(_by_tokens(case.in_coarse_pieces)), _free_from_tokens(case), tuple(_ways(case)), tuple(_machines(case)))


def with_weights(case: Case, weights: Weights) -> Case:
    """The same case with its weights there."""
    return case.remade(shape=replace(case.shape, weights=weights))


def _by_tokens(case: Case) -> Iterator[AtTokens]:
    for tokens in whole_batches(case):
        streamed, resident = (with_weights(case.remade(tokens=tokens), weights).plan_at(OUR_SYSTEM, 0).predicted
                              for weights in ("streamed", "resident"))
        yield AtTokens(tokens, resident["compute_us"], resident["step_us"], streamed["step_us"], streamed["fetch_stall_us"])


def _free_from_tokens(case: Case) -> dict[str, float]:
    profile, backward = case.profile, 6 if case.recompute else 4
    fetch_us = sum(u.fetch_us for u in profile.units)

    tokens = functools.partial(hiding_tokens, case)
    found = {"fetches of the forward": tokens(fetch_us, 2), "fetches of the backward": tokens(fetch_us, backward)}
    if (rate := bytes_per_us(profile)) is not None:
        found["all that moves in the host's memory"] = tokens(sum(map(cpu_bytes, profile.units)) / rate, 2 + backward)
    return found


def hiding_tokens(case: Case, us: float, flops: int) -> float:
    """Tokens whose computing takes so long, at so many FLOPs a parameter and token."""
    return 1e-6 * us / case.shape.params * case.device.achieved_flops / flops


def _ways(case: Case) -> Iterator[Peer]:
    places: tuple[tuple[Weights, str], ...] = (("streamed", "weights on the host"), ("resident", "weights on the GPU"))
    made = case.plan_of(OUR_SYSTEM)
    yield _way("weights on the host, plan solved", case, case.row_of(OUR_SYSTEM, made), "split")
    for weights, words in places:
        for recompute in sorted({case.recompute, True}):
            of = with_weights(case, weights).remade(recompute=recompute)
            told = f"{words}, all updates by the CPU" + (", activations recomputed" if recompute else "")
            yield _way(told, of, of.row_of(OUR_SYSTEM, of.plan_at(OUR_SYSTEM, 0)), "host")
    yield from offloaded_peers(with_weights(case, "resident"))


def _way(words: str, case: Case, row: Row, way: str) -> Peer:
    largest = next(of.params for of in capacities(case.shape, case.device, case.tokens, case.sequence, case.recompute) if of.way == way)
    how = f"played: k = {row.k}" + (f", {row.stream_share:.0%} of the rest's states streamed" if row.stream_share else "")
    return Peer(f"this library, {words}", row.step_us, row.memory.device_bytes, row.memory.host_bytes, row.fits, largest or 0, how)


def _machines(case: Case) -> Iterator[OfMachine]:
    for gpu_gb, host_gb, params in largest_by_machine(case, ("resident", "streamed"), HOST_GB):
        yield OfMachine(gpu_gb, host_gb, params["resident"], params["streamed"])


def largest_by_machine(
    case: Case, places: Sequence[Weights], host_gb: Sequence[int]
) -> Iterator[tuple[int, int, dict[str, int | None]]]:
    """GB of a GPU and of a host of common sizes, and the largest model by where its weights rest.

    In parameters, 0 = none, None = no layers repeat. All updates are by the CPU, activations
    recomputed.
    """
    sized = {place: functools.cache(replace(case.shape, weights=place).with_layers) for place in places}

    def largest(place: Weights, device: DeviceSpec) -> int | None:
        if not case.shape.layers:
            return None
        layers = most_layers(lambda count: fits("host", sized[place](count), device, case.tokens, True, case.ranks))
        return sized[place](layers).params if layers else 0

    for gpu in GPU_GB:
        for host in host_gb:
            device = replace(case.device, memory_bytes=int(1e9 * gpu), host_memory_bytes=int(1e9 * host))
            yield gpu, host, {place: largest(place, device) for place in places}


def free_text(found: StreamedWeights, counted: str) -> str:
    """From how many tokens on what is hidden, in a sentence."""
    parts = ", ".join(f"{count_text(tokens)} ({what})" for what, tokens in found.free_from_tokens.items())
    most = max(found.free_from_tokens.values())
    return f"Weights on the host are free from about {count_text(most)} {counted} in a micro-batch on: {parts}."
