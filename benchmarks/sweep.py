"""One model over ever larger micro-batches: predicted steps beside measured ones.

The result is a table and a plot.

    python -m benchmarks sweep 1b --tokens 2048,4096,8192,16384,32768,65536 --out DIR

A micro-batch is made of sequences of --sequence tokens. Every point is a process of its own, with
the caches of those before it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.case import CannotRun, Case
from benchmarks.markdown import failures, machines, table
from benchmarks.plots import Series, draw_lines
from benchmarks.results import Results, floor_of
from benchmarks.runner import measure
from benchmarks.table import add_run_arguments, launch_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m benchmarks sweep`."""
    parser.add_argument("size")
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[2048 << i for i in range(6)],
                        help="tokens in a micro-batch, as 2048,4096 (default: 2048 to 65536)")
    parser.add_argument("--sequence", "--seq", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="option of hytrain_fx.compile")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    add_run_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure what is missing; write sweep.md and sweep.png.

    Raises CannotRun where tokens are not a whole number of sequences.
    """
    results = Results(arguments.out / "results.json")
    ours = cases(arguments)
    measure([case for point in ours for case in (floor_of(point), point)], results, launch_of(arguments), again=arguments.again,
            retry=arguments.retry)
    text = markdown(results, ours)
    (arguments.out / "sweep.md").write_text(text)
    draw(results, ours, arguments.out / "sweep.png")
    print(text)


def cases(arguments: argparse.Namespace) -> list[Case]:
    """The points of the sweep, in mode `ours`."""
    uneven = [tokens for tokens in arguments.tokens if tokens < 1 or tokens % arguments.sequence]
    if uneven:
        raise CannotRun(f"{uneven[0]} tokens are no whole number of sequences of {arguments.sequence}; give multiples, or --sequence")
    one = Case("ours", arguments.size, 1, arguments.sequence, checkpointing=arguments.checkpointing, options=tuple(arguments.option))
    return [replace(one, batch=tokens // arguments.sequence) for tokens in arguments.tokens]


def markdown(results: Results, points: list[Case]) -> str:
    """Tokens, floor, measured, predicted, how far off, k; then what failed."""
    lines = []
    for case in points:
        if (row := results.measured(case)) is None:
            continue
        floor, over = results.measured(floor_of(case)), results.step_over(case, floor_of(case))
        predicted = row["predicted_step_s"]
        lines.append([
            str(case.tokens), f"{floor['step_s']:.4f}" if floor else "-", f"{row['step_s']:.4f}", f"{row['spread']:.1%}",
            f"{over:.3f}" if over else "-",
            f"{predicted:.4f}" if predicted else "-", f"{predicted / row['step_s'] - 1:+.1%}" if predicted else "-",
            f"{row['plan']['k']}/{row['plan']['units']}", f"{row['plan']['share']['stream']:.0%}", f"{case.tokens / row['step_s']:.0f}",
        ])
    head = ("tokens", "floor s", "s a step", "spread", "of floor", "predicted s", "predicted off", "k", "streamed", "tokens/s")
    title = f"# {points[0].size}, sequences of {points[0].sequence}" if points else "# No points"
    return "\n\n".join(part for part in (title, machines(results), table(head, lines), failures(results)) if part) + "\n"


def draw(results: Results, points: list[Case], path: Path) -> None:
    """Measured points, the predicted line, the floor."""
    found = [(case, row) for case in points if (row := results.measured(case)) is not None]
    floors = [(case, row) for case in points if (row := results.measured(floor_of(case))) is not None]
    draw_lines(path, f"{points[0].size}: step time by tokens in a micro-batch" if points else "", "tokens", "seconds a step", [
        Series("measured", {case.tokens: row["step_s"] for case, row in found}, "o"),
        Series("predicted", {case.tokens: row["predicted_step_s"] for case, row in found if row["predicted_step_s"]}, "-"),
        Series("forward and backward alone", {case.tokens: row["step_s"] for case, row in floors}, "--"),
    ], logarithmic=True)
