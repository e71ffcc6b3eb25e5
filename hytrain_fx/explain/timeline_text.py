"""A timeline as lanes of characters: each cell shows the task that took most of it.

A task that is wide enough carries its label (`|b3----`), a narrower one fills its cells with its letter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hytrain_fx.cost_model.figures import time_text

if TYPE_CHECKING:
    from hytrain_fx.explain.timeline import Span, Timeline

LEGEND = "f forward  b backward  . wait  g gradient to the host  u update by the CPU  U update on the device  w weight to the device"


def timeline_text(timeline: Timeline, width: int) -> str:
    """Lanes, a scale, the legend, and what share of the CPU updates was hidden."""
    if not timeline.spans:
        return f"{timeline.source}: nothing was recorded"
    margin = max(len(lane) for lane in timeline.lanes) + 2
    cells = max(width - margin, 10)
    lines = [lane.ljust(margin) + _lane(spans, timeline.length_us, cells) for lane, spans in timeline.lanes.items()]
    end = time_text(timeline.length_us)
    lines.append(" " * margin + "0" + end.rjust(cells - 1))
    share = timeline.overlap_share
    if share is not None:
        lines.append(f"{share:.0%} of the CPU updates' time ran beside a forward or backward ({timeline.source})")
    return "\n".join([*lines, LEGEND])


def _lane(spans: tuple[Span, ...], length_us: float, cells: int) -> str:
    owner: list[Span | None] = [None] * cells
    most = [0.0] * cells
    cell_us = length_us / cells if length_us else 1.0
    for span in spans:
        for cell in range(min(int(span.begin_us / cell_us), cells - 1), min(int(span.end_us / cell_us), cells - 1) + 1):
            part_us = min(span.end_us, (cell + 1) * cell_us) - max(span.begin_us, cell * cell_us)
            if part_us > most[cell]:
                owner[cell], most[cell] = span, part_us
    return "".join(_runs(owner)).rstrip()


def _runs(owner: list[Span | None]) -> list[str]:
    """One text for each run of cells with the same owner."""
    texts: list[str] = []
    at = 0
    while at < len(owner):
        span, begin = owner[at], at
        while at < len(owner) and owner[at] is span:
            at += 1
        texts.append(_fill(span, at - begin))
    return texts


def _fill(span: Span | None, cells: int) -> str:
    if span is None:
        return " " * cells
    letter = span.label[0]
    if cells <= len(span.label):
        return letter * cells
    return f"|{span.label}".ljust(cells, "." if letter == "." else "-")
