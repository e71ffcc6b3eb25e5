"""Bytes of host memory that a step moves, and the least time that they take: bound and achieved.

    python -m benchmarks bytes --size 3b --batch 4 --out bytes.json
    python -m benchmarks bytes --size tiny --batch 1 --sequence 32      # runs on any machine

Three rows, each in a process of its own, one after the other: forward and backward alone, and every
state on the host with moments in fp32 and in bf16. The machine's rates are measured first, with
copies and updates at once (`python -m hytrain_fx profile`).

    bound       the largest of floor, memory and link for the best mix (benchmarks/limit.py)
    of its mix  the same bytes for the share that this run streamed
    GB/s        what the step's bytes come to over the whole step; beside it the measured rate

A virtual machine seldom shows counters of its memory's controllers, so bytes are those that the
kernels and copies ask for. Where GB/s is the machine's rate, memory binds and no order of work is
faster; where it is less, the rest is time in which memory waits: see `explain` for whom.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import Case
from benchmarks.limit import Limit, Rates, limit_of, seconds_of_mix
from benchmarks.markdown import table
from benchmarks.results import Results
from benchmarks.runner import Launch, measure
from benchmarks.zoo import require_rates
from hytrain_fx.ir.limits import HALF_BYTES
from hytrain_fx.ir.states import ADAMW, MOMENTS, StateTraffic

KINDS = ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of host memory a parameter that one kernel or copy reads and writes."""

    what: str
    by_cpu: int
    streamed: int


def traffic_of(moments: str) -> StateTraffic:
    """Of bf16 parameters under AdamW, whose masters are in halves."""
    return StateTraffic(ADAMW.under({MOMENTS: moments}).bytes_per_param)


def parts_of(moments: str) -> tuple[Part, ...]:
    """All that an update moves. The sums are those of the cost model (ir/states.py)."""
    kept = sum(state.itemsize for state in ADAMW.under({MOMENTS: moments}).states)
    return (
        Part("gradient: written by its copy", HALF_BYTES, 0),
        Part("gradient: read by the update", HALF_BYTES, 0),
        Part("half of the master that is the weight: read and written", 2 * HALF_BYTES, 0),
        Part("other half: read and written", 2 * HALF_BYTES, 2 * HALF_BYTES),
        Part(f"moments in {moments}: read and written", 2 * kept, 2 * kept),
        Part("new weight: read by its copy", HALF_BYTES, 0),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m benchmarks bytes`."""
    parser.add_argument("--size", default="3b", help="a Llama shape or a family of the zoo")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens in one")
    parser.add_argument("--window", type=int, default=10, help="steps in one of the three windows")
    parser.add_argument("--warmup", type=int, default=None, help="steps before the first window")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for all of this call")
    parser.add_argument("--out", type=Path, default=Path("bytes.json"), help="the rows; logs are in a folder beside it")


def run(arguments: argparse.Namespace) -> None:
    """Run the rows that are not in the file and print both tables. Raises CannotRun."""
    results, logs = Results(arguments.out), arguments.out.with_suffix(".logs")
    rates = Rates.of(require_rates(results, logs))
    cases = cases_of(arguments.size, arguments.batch, arguments.sequence)
    extra = ("--window", str(arguments.window), *(("--warmup", str(arguments.warmup)) if arguments.warmup is not None else ()))
    measure(list(cases.values()), results, Launch(logs, arguments.limit_s, extra, total_s=arguments.limit_s))
    print(parts_table())
    print(f"\n{rows_table({name: results.measured(case) for name, case in cases.items()}, rates)}")


def cases_of(size: str, batch: int, sequence: int) -> dict[str, Case]:
    """The floor, and ours by moments."""
    ours = {kind: Case("ours", size, batch, sequence, options=("gpu_states=0.0", f"moments={kind}")) for kind in KINDS}
    return {"floor": Case("floor", size, batch, sequence), **ours}


def parts_table() -> str:
    """Bytes a parameter, by kind of moments."""
    lines = []
    for kind in KINDS:
        parts = parts_of(kind)
        lines += [[of.what, str(of.by_cpu), str(of.streamed)] for of in parts]
        lines.append([f"**sum, moments in {kind}**", f"**{sum(of.by_cpu for of in parts)}**", f"**{sum(of.streamed for of in parts)}**"])
    return table(("host memory, bytes a parameter", "updated by the CPU", "streamed"), lines)


def rows_table(rows: dict[str, Any], rates: Rates | None) -> str:
    """Bound and achieved of each row that is there."""
    head = ("moments", "s a step", "of floor", "bound, s", "binds", "of bound", "streamed", "best mix", "of its mix", "GB a step",
            "GB/s", "of the measured")
    return table(head, [_line(kind, rows, rates) for kind in KINDS if rows.get(kind) and rows.get("floor")])


def _line(kind: str, rows: dict[str, Any], rates: Rates | None) -> Sequence[str]:
    floor_s, row = rows["floor"]["step_s"], rows[kind]
    step_s, params, streamed = row["step_s"], row["params"], row["plan"]["share"]["stream"]
    by_cpu, by_stream = (sum(getattr(of, name) for of in parts_of(kind)) for name in ("by_cpu", "streamed"))
    moved = params * (by_cpu * (1 - streamed) + by_stream * streamed)
    told = [kind, f"{step_s:.4f}", f"{step_s / floor_s:.3f}"]
    mix = [f"{100 * streamed:.0f} %"]
    sums = [f"{moved / 1e9:.1f}", f"{moved / step_s / 1e9:.0f}"]
    if rates is None:
        return [*told, "-", "-", "-", *mix, "-", "-", *sums, "-"]
    bound: Limit = limit_of(floor_s, params, rates, traffic_of(kind))
    own_s = max(floor_s, *seconds_of_mix(params, streamed, rates, traffic_of(kind)))
    return [*told, f"{bound.step_s:.4f}", bound.binds, f"{step_s / bound.step_s:.3f}", *mix, f"{100 * bound.streamed:.0f} %",
            f"{step_s / own_s:.3f}", *sums, f"{100 * moved / step_s / rates.memory:.0f} %"]
