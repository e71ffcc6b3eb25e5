"""Draw docs/before_after.png: two measured steps on one scale.

One has a barrier after the backward, the other is with hytrain_fx.

    python docs/draw_timelines.py barrier.json ours.json [file.png]
        [--heading "a 3.1 G parameter Llama on one H200, 8192 tokens a step"]

The two files are Chrome traces that two runs on one machine wrote:

    python -m benchmarks steps ours 3b --option k=0 --option stream=0 --barrier
        --timeline barrier.json
    python -m benchmarks steps ours 3b --option gpu_states=0.0 --timeline ours.json

Each picture is the last whole step of its file, from the begin of the device's backward to the
begin of the next one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hytrain_fx.explain.timeline.picture import write_png
from hytrain_fx.explain.timeline.timeline import Timeline, read_trace
from hytrain_fx.ir.figures import time_text

TITLES = ("Before (as ZeRO-Offload schedules): backward, then updates, then the forward",
          "hytrain_fx: updates beside the backward and the forward")


def measured_step(path: Path) -> Timeline:
    """The last whole step that the file's measured timeline has."""
    return next(timeline for timeline in read_trace(path) if timeline.source == "measured").last_step()


def draw(paths: Sequence[Path], out: Path, heading: str = "") -> None:
    """Write the picture (PNG) of the two files' steps to `out`."""
    steps = [measured_step(path) for path in paths]
    titles = [f"{title}: {time_text(step.length_us)} a step{_hidden(step)}" for title, step in zip(TITLES, steps, strict=True)]
    write_png(steps, out, titles, ". ".join(filter(None, ["Measured, one training step each", heading])))


def _hidden(step: Timeline) -> str:
    share = step.overlap_share
    return "" if share is None else f", {share:.0%} of the CPU updates' time beside a forward or backward"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("barrier", type=Path)
    parser.add_argument("ours", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).with_name("before_after.png"))
    parser.add_argument("--heading", default="", help="model, machine, tokens")
    parsed = parser.parse_args(arguments)
    draw([parsed.barrier, parsed.ours], parsed.out, parsed.heading)


if __name__ == "__main__":
    main()
