"""What weights in shards cost and save, for one model on several GPUs.

    by tokens    a step with all updates by the CPU: weights whole on each GPU, in shards on the
                 GPUs, in shards on the host
    free from    tokens from which gathers are hidden: the time of all units' gathers against the
                 FLOPs of the pass, 2 a parameter and token in the forward, 4 in the backward, with
                 recomputation 6
    machines     the largest model by memory of each GPU and of each host
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hytrain_fx.config import Weights
from hytrain_fx.forecast.streamed_weights import hiding_tokens, largest_by_machine, with_weights
from hytrain_fx.forecast.sweep import whole_batches
from hytrain_fx.forecast.systems import OUR_SYSTEM, Case
from hytrain_fx.ir.figures import count_text

HOST_GB = (128, 256, 512, 1024)
PLACES: tuple[Weights, ...] = ("resident", "sharded", "sharded_host")


@dataclass(frozen=True, slots=True)
class AtTokens:
    """One micro-batch of each GPU: steps by where weights rest, in microseconds.

    gather_stall_us    how long the device then stands still for shards of the GPUs
    """

    tokens: int
    compute_us: float
    resident_us: float
    sharded_us: float
    sharded_host_us: float
    gather_stall_us: float


@dataclass(frozen=True, slots=True)
class OfMachine:
    """The largest model of these layers at the case's micro-batch, in parameters, by place.

    Activations are recomputed. 0 = none; None = no layers repeat.
    """

    gpu_gb: int
    host_gb: int
    params: dict[str, int | None]


@dataclass(frozen=True, slots=True)
class ShardedWeights:
    """The figures above. `free_from_tokens` maps what hides to what hides it."""

    by_tokens: tuple[AtTokens, ...]
    free_from_tokens: dict[str, float]
    machines: tuple[OfMachine, ...]


def sharded_weights(case: Case) -> ShardedWeights:
    """For a case of several GPUs."""
    machines = tuple(OfMachine(*of) for of in largest_by_machine(case, PLACES, HOST_GB))
    return ShardedWeights(tuple(_by_tokens(case.in_coarse_pieces)), _free_from_tokens(case), machines)


def _by_tokens(case: Case) -> Iterator[AtTokens]:
    for tokens in whole_batches(case):
        resident, sharded, on_host = (with_weights(case.remade(tokens=tokens), of).plan_at(OUR_SYSTEM, 0).predicted for of in PLACES)
        yield AtTokens(tokens, resident["compute_us"], resident["step_us"], sharded["step_us"], on_host["step_us"],
                       sharded["fetch_stall_us"])


def _free_from_tokens(case: Case) -> dict[str, float]:
    gather_us = sum(u.gather_us for u in with_weights(case, "sharded").profile.units)
    flops_of = {"gathers of the forward": 2, "gathers of the backward": 6 if case.recompute else 4}
    return {what: hiding_tokens(case, gather_us, flops) for what, flops in flops_of.items()}


def shards_free_text(found: ShardedWeights, counted: str) -> str:
    """From how many tokens on what is hidden, in a sentence."""
    parts = ", ".join(f"{count_text(tokens)} ({what})" for what, tokens in found.free_from_tokens.items())
    return f"Gathers take as long as computing at {parts} in a micro-batch of {counted}: from there on each but the first may be hidden."
