"""Three figures from results.json.

They show throughput by model and batch, the largest model by batch, and the share of a step in
which the GPU is idle.

    python -m benchmarks figures --out DIR     draw what is in results.json and trials.json
    python -m benchmarks figures --out DIR --run --sizes 1b,3b --batches 1,4  run what is missing

The largest models are estimated from bytes by tier; `python -m benchmarks largest` puts trials
beside the estimates.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.case import TITLES, Case
from benchmarks.estimates import estimate_params, spec_of
from benchmarks.markdown import failures, machines, table
from benchmarks.plots import Series, draw_bars, draw_lines
from benchmarks.results import Results, Row
from benchmarks.runner import measure
from benchmarks.table import add_run_arguments, launch_of
from hytrain_fx.forecast.device import DeviceSpec

MODES = ("all_gpu", "zero_offload", "torchao", "ours")
Groups = dict[str, dict[str, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m benchmarks figures`."""
    parser.add_argument("--run", action="store_true", help="measure the rows of --sizes and --batches that are missing")
    parser.add_argument("--sizes", type=_words, default=["1b", "3b", "7b"])
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--sequence", "--seq", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--modes", type=_words, default=list(MODES))
    parser.add_argument("--device", default=None, help="whose memory the largest models are estimated for (default: this machine)")
    add_run_arguments(parser)


def _words(text: str) -> list[str]:
    return text.split(",")


def run(arguments: argparse.Namespace) -> None:
    """Write throughput.png, largest.png, idle.png and figures.md."""
    results, trials = Results(arguments.out / "results.json"), Results(arguments.out / "trials.json")
    if arguments.run:
        cases = [Case(mode, size, batch, arguments.sequence)
                 for size in arguments.sizes for batch in arguments.batches for mode in arguments.modes]
        measure(cases, results, launch_of(arguments), again=arguments.again, retry=arguments.retry)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    speed = groups(results, lambda case, row: case.tokens / row["step_s"])
    idle = groups(results, lambda case, row: 100 * row["idle_share"] if "idle_share" in row else None)
    largest = estimates_and_trials(spec_of(arguments.device), arguments.batches, arguments.sequence, trials)
    draw_bars(out / "throughput.png", "Throughput by model and batch", "tokens/s", speed)
    draw_bars(out / "idle.png", "GPU idle time in a step (no kernel runs)", "% of the step", idle)
    draw_lines(out / "largest.png", "Largest model by batch: dashed = estimated, dots = ran", f"sequences of {arguments.sequence}",
               "G parameters", largest)
    text = "\n\n".join(part for part in (
        f"# Figures\n\n{machines(results)}",
        f"## Throughput, tokens/s\n\n{groups_table(speed, '{:.0f}')}",
        f"## Largest model, G parameters\n\n{largest_table(largest)}",
        f"## GPU idle time, % of a step\n\n{groups_table(idle, '{:.1f}')}",
        failures(results)) if part) + "\n"
    (out / "figures.md").write_text(text)
    print(text)


def groups(results: Results, figure_of: Callable[[Case, Row], float | None]) -> Groups:
    """Model and batch, small ones first -> way of training -> figure. Plain training only: no
    clipping, bf16 (torchao: autocast), the floor left out.
    """
    found: Groups = {}
    for case, row in sorted(results.all_measured(), key=lambda of: (of[1]["params"], of[0].batch, list(TITLES).index(of[0].mode))):
        plain = replace(case, clip=None, scaled_every=1, autocast=case.mode == "torchao", checkpointing=False, micro_batches=1)
        value = figure_of(case, row)
        if case == plain and case.mode != "floor" and value is not None:
            found.setdefault(f"{case.size}\n{case.batch} x {case.sequence}", {})[case.title] = value
    return found


def groups_table(found: Groups, form: str) -> str:
    """The same as Markdown: a row for each model and batch."""
    names = list(dict.fromkeys(name for bars in found.values() for name in bars))
    lines = [[group.replace("\n", ", "), *(form.format(bars[name]) if name in bars else "-" for name in names)]
             for group, bars in found.items()]
    return table(["model, batch", *names], lines) if lines else "Nothing measured."


def estimates_and_trials(spec: DeviceSpec, batches: Sequence[int], sequence: int, trials: Results) -> list[Series]:
    """G parameters of the largest model by batch, for each mode.

    An estimate (models of N layers of N heads), and what was found by trial where there is any.
    """
    found = []
    for mode in ("all_gpu", "zero_offload", "ours"):
        params = {batch: estimate_params(Case(mode, "w1", batch, sequence), spec) for batch in batches}
        estimate = {float(batch): most / 1e9 for batch, most in params.items() if most}
        found.append(Series(f"{TITLES[mode]}, estimated for {spec.name}", estimate, "--"))
        if tried := _largest_tried(mode, sequence, trials):
            found.append(Series(f"{TITLES[mode]}, by trial", tried, "o"))
    return found


def _largest_tried(mode: str, sequence: int, trials: Results) -> dict[float, float]:
    """By batch, of rows with all of the machine's memory and no options."""
    largest: dict[float, float] = {}
    for case, row in trials.all_measured():
        plain = Case(mode, case.size, case.batch, sequence)
        if case == plain:
            largest[float(case.batch)] = max(largest.get(float(case.batch), 0.0), row["params"] / 1e9)
    return largest


def largest_table(series: Sequence[Series]) -> str:
    """The same as Markdown: a row for each batch."""
    batches = sorted({x for line in series for x in line.points})
    lines = [[f"{batch:g}", *(_cell(line.points, batch) for line in series)] for batch in batches]
    return table(["batch", *(line.name for line in series)], lines)


def _cell(points: Mapping[float, float], batch: float) -> str:
    return f"{points[batch]:.2f}" if batch in points else "-"
