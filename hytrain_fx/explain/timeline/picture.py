"""Timelines as a picture: lanes of bars, one timeline below the other on one scale.

Colours have a legend.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.explain.timeline.lanes import Lanes
from hytrain_fx.explain.timeline.launching import launches_text
from hytrain_fx.explain.timeline.span import WORDS, Kind, LaunchKind, Span, merged
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.task_graph import TaskKind

COLOURS: dict[Kind, str] = {
    TaskKind.FORWARD: "#4c78a8", TaskKind.BACKWARD: "#9ecae9", TaskKind.WAIT: "#e45756", TaskKind.D2H: "#f2cf5b",
    TaskKind.CPU_UPDATE: "#54a24b", TaskKind.GPU_UPDATE: "#a6d854", TaskKind.H2D: "#b279a2",
    TaskKind.STREAM_IN: "#ff9da6", TaskKind.STREAM_OUT: "#d6a5c9",
    TaskKind.FETCH_FORWARD: "#9d755d", TaskKind.FETCH_BACKWARD: "#d8b5a5",
    TaskKind.GATHER_FORWARD: "#7b6888", TaskKind.GATHER_BACKWARD: "#c9bdd3",
    TaskKind.RECEIVE: "#bab0ac", TaskKind.REDUCE_SCATTER: "#f58518", TaskKind.ALL_GATHER: "#72b7b2",
    LaunchKind.FORWARD: "#4c78a8", LaunchKind.BACKWARD: "#9ecae9", LaunchKind.GATE: "#e45756", LaunchKind.STEP: "#222222",
}
_WIDTH_IN, _LANE_IN = 14.0, 0.24
_PIXELS = 2000  # narrower gaps are not seen: the bars next to them are one
_WORKERS, _THIN = 4, 0.4  # lanes of more CPU workers than this are drawn this high
_LEGEND = 8  # words on one line of the legend
_LABELS = 45  # bars wider than this part of the scale carry their label


def write_png(timelines: Sequence[Lanes], path: Path, titles: Sequence[str] = (), heading: str = "") -> None:
    """Draw the timelines below one another on one scale, each under its title or its source.

    Raises UnsupportedError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise UnsupportedError(f"a picture needs matplotlib: {error}; install it, or save a .json trace") from error
    titles = titles or [f"{t.source}, {time_text(t.length_us)}" for t in timelines]
    lanes = [max(_places(timeline)[-1][1], 1.0) for timeline in timelines]
    figure = Figure(figsize=(_WIDTH_IN, 0.9 + sum(_LANE_IN * count + 0.55 for count in lanes)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=lanes)[:, 0]
    scale_us = max(timeline.length_us for timeline in timelines)
    for axis, timeline, title in zip(axes, timelines, titles, strict=True):
        _draw(axis, timeline, scale_us)
        axis.set_title("\n".join([title, *launches_text(timeline.launches, timeline.unit_names)[:1]]), loc="left", fontsize=9)
    axes[-1].set_xlabel("ms")
    looks = {WORDS[kind]: COLOURS[kind] for kind in COLOURS if any(s.kind is kind for t in timelines for s in t.spans)}
    handles = [Patch(color=colour, label=words) for words, colour in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(max(len(handles), 1), _LEGEND), fontsize=8)
    if heading:
        figure.suptitle(heading, fontsize=11)
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})


def _draw(axis: Any, timeline: Lanes, scale_us: float) -> None:
    places = _places(timeline)
    for (top, bottom), spans in zip(places, timeline.lanes.values(), strict=True):
        bars = merged(spans, scale_us / _PIXELS)
        gap = (bottom - top) / 10
        axis.broken_barh([(bar.begin_us / 1e3, (bar.end_us - bar.begin_us) / 1e3) for bar in bars], (top + gap, bottom - top - 2 * gap),
                         facecolors=[COLOURS[bar.kind] for bar in bars], edgecolor="white", linewidth=0.2)
        if bottom - top == 1.0:
            for bar in bars:
                _label(axis, bar, (top + bottom) / 2, scale_us)
    axis.set_xlim(0, max(scale_us, 1e-3) / 1e3)
    axis.set_ylim(places[-1][1], 0)
    axis.set_yticks([(top + bottom) / 2 for top, bottom in places], _names(timeline), fontsize=7)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)
    for launch in timeline.launches:  # when step() returned, through all lanes
        axis.axvline(launch.step_end_us / 1e3, color=COLOURS[LaunchKind.STEP], linewidth=0.6, linestyle=":")


def _places(timeline: Lanes) -> list[tuple[float, float]]:
    """Top and bottom of each lane; lanes of many CPU workers are thinner."""
    thin = sum(map(_is_worker, timeline.lanes)) > _WORKERS
    ends = list(itertools.accumulate((_THIN if thin and _is_worker(lane) else 1.0 for lane in timeline.lanes), initial=0.0))
    return list(itertools.pairwise(ends)) or [(0.0, 1.0)]


def _names(timeline: Lanes) -> list[str]:
    """The lanes' names; of many CPU workers the first name and the last."""
    lanes = list(timeline.lanes)
    workers = [lane for lane in lanes if _is_worker(lane)]
    hidden = set(workers[1:-1]) if len(workers) > _WORKERS else set()
    return ["" if lane in hidden else lane for lane in lanes]


def _is_worker(lane: str) -> bool:
    return lane.startswith("CPU ")


def _label(axis: Any, bar: Span, y: float, scale_us: float) -> None:
    if bar.end_us - bar.begin_us > scale_us / _LABELS:
        axis.text((bar.begin_us + bar.end_us) / 2e3, y, bar.label, ha="center", va="center", fontsize=6)
