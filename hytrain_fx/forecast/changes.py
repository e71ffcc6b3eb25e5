"""What would help first: our plan solved again with one thing changed.

The program's own choices come before the machine's. Each change is one that people can make: other
tokens, recomputation, more memory, a faster host or link. All are played in the sweep's pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hytrain_fx.forecast.device import MOST_TOKENS
from hytrain_fx.forecast.systems import OUR_SYSTEM, Case

LEAST_GAIN = 0.02  # of tokens a second; what is less is not worth a change
_HOST_RATES = ("cpu_update_params_per_s", "host_memory_gb_per_s")
_LINK_RATES = ("d2h_bytes_per_s", "h2d_bytes_per_s")
_GPUS_RATES = ("gpu_link_bytes_per_s", "network_bytes_per_s")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing changed, and what our plan is then predicted to take.

    `of_machine` tells it from one of the program. `gain` is the share of tokens a second that it
    adds, negative where it takes some.
    """

    words: str
    of_machine: bool
    tokens: int
    step_us: float
    gain: float
    fits: bool


def changes(case: Case) -> tuple[Change, ...]:
    """Every change, the program's own first."""
    coarse = case.in_coarse_pieces
    base = coarse.row_of(OUR_SYSTEM, coarse.plan_of(OUR_SYSTEM))
    found = []
    for words, changed in (*_of_program(coarse), *_of_machine(coarse)):
        row = changed.row_of(OUR_SYSTEM, changed.plan_of(OUR_SYSTEM))
        gain = (changed.tokens / row.step_us) / (case.tokens / base.step_us) - 1
        found.append(Change(words, changed.device != case.device, changed.tokens, row.step_us, gain, row.fits))
    return tuple(found)


def first_changes(found: tuple[Change, ...], fits: bool) -> tuple[Change, ...]:
    """What to change first: of the program, and of the machine.

    Where the model fits that is what adds most tokens a second of each, if it adds `LEAST_GAIN`;
    where it does not, the first of each that makes it fit.
    """
    first = []
    for of_machine in (False, True):
        those = [change for change in found if change.fits and change.of_machine is of_machine]
        best = those[:1] if not fits else sorted(those, key=lambda change: -change.gain)[:1]
        first += [change for change in best if not fits or change.gain >= LEAST_GAIN]
    return tuple(first)


def _of_program(case: Case) -> Iterator[tuple[str, Case]]:
    least = min(case.sequence, case.tokens)
    if 2 * case.tokens <= MOST_TOKENS:
        yield f"twice the {case.shape.counted} in a micro-batch", case.remade(tokens=2 * case.tokens)
    if case.tokens >= 2 * least:
        yield f"half the {case.shape.counted} in a micro-batch", case.remade(tokens=case.tokens // 2 // least * least)
    yield ("no recomputation" if case.recompute else "recomputed activations"), case.remade(recompute=not case.recompute)


def _of_machine(case: Case) -> Iterator[tuple[str, Case]]:
    spec = case.device
    yield "twice the host memory", case.remade(device=replace(spec, host_memory_bytes=2 * spec.host_memory_bytes))
    yield "twice the memory on the GPU", case.remade(device=replace(spec, memory_bytes=2 * spec.memory_bytes))
    yield "a host twice as fast (cores and memory bandwidth)", _faster(case, _HOST_RATES)
    yield "a link to the host twice as fast", _faster(case, _LINK_RATES)
    if case.ranks.count > 1:
        yield "links between the GPUs twice as fast", _faster(case, _GPUS_RATES)


def _faster(case: Case, names: tuple[str, ...]) -> Case:
    figures = case.device.figures()
    twice = {name: 2 * figures[name] for name in names if name in figures}
    return case.remade(device=replace(case.device, **twice))  # type: ignore[arg-type]
