"""Plots, as PNG files, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import CannotRun
from benchmarks.results import Results, floor_of

COLORS = ("#4c78a8", "#e45756", "#54a24b", "#f2cf5b", "#b279a2", "#9d755d", "#76b7b2", "#bab0ac")


@dataclass(frozen=True)
class Look:
    """Colours of paper and ink, and dots an inch."""

    paper: str = "white"
    ink: str = "black"
    faint: str = "#d0d7de"
    dpi: int = 130


PLAIN = Look()


@dataclass(frozen=True)
class Series:
    """Points of one line, `x` -> `y`; `style` is matplotlib's format string."""

    name: str
    points: Mapping[float, float]
    style: str = "o-"


def figure(width: float, height: float, look: Look = PLAIN) -> Any:
    """An empty matplotlib figure. Raises CannotRun where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CannotRun("plots need matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained", facecolor=look.paper)


def dress(axes: Any, look: Look) -> None:
    """Paint paper and ink of one plot."""
    axes.set_facecolor(look.paper)
    axes.tick_params(colors=look.ink)
    for spine in axes.spines.values():
        spine.set_color(look.ink)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(look.ink)


def legend(owner: Any, look: Look, **places: Any) -> None:
    """The legend of a plot or a figure, in its ink."""
    owner.legend(facecolor=look.paper, edgecolor=look.faint, labelcolor=look.ink, **{"fontsize": 8} | places)


def save(canvas: Any, path: Path, look: Look) -> None:
    """Write a PNG that says nothing of the program that drew it."""
    canvas.savefig(path, format="png", dpi=look.dpi, metadata={"Software": None})


def draw_step_times(results: Results, path: Path) -> None:
    """Step time of every measured row, a line at its floor."""
    rows = list(results.all_measured())
    canvas = figure(9, 1.2 + 0.34 * max(len(rows), 1))
    axes = canvas.subplots()
    modes = list(dict.fromkeys(case.mode for case, _ in rows))
    for at, (case, row) in enumerate(rows):
        axes.barh(at, row["step_s"], color=COLORS[modes.index(case.mode) % len(COLORS)])
        axes.text(row["step_s"], at, f" {row['step_s']:.3f} s", va="center", fontsize=8)
        over = results.step_over(case, floor_of(case))
        if over is not None and case.mode != "floor":
            axes.plot([row["step_s"] / over] * 2, [at - 0.4, at + 0.4], color="black", linewidth=1.5)
    axes.set_yticks(range(len(rows)), [case.key for case, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds a step; the black line is forward and backward alone")
    canvas.savefig(path, dpi=130)


def draw_bars(
    path: Path, title: str, unit: str, groups: Mapping[str, Mapping[str, float]], look: Look = PLAIN,
    size: tuple[float, float] | None = None,
) -> None:
    """Groups of bars side by side: group -> bar's name -> height.

    A name has the same color in all groups.
    """
    canvas = figure(*(size or (_width_in(groups), 4.5)), look)
    axes = canvas.subplots()
    names = _bars(axes, groups)
    _finish(canvas, axes, path, title, unit, look, named=bool(names))


@dataclass(frozen=True)
class Panel:
    """One of several plots of bars: as `draw_bars`."""

    title: str
    unit: str
    groups: Mapping[str, Mapping[str, float]]


def draw_bar_panels(path: Path, panels: Sequence[Panel], look: Look = PLAIN) -> None:
    """Plots of bars under each other, with the legend on the first."""
    canvas = figure(max(_width_in(panel.groups) for panel in panels), 3.6 * len(panels), look)
    for panel, axes in zip(panels, canvas.subplots(len(panels), squeeze=False).flat, strict=True):
        names = _bars(axes, panel.groups)
        _label(axes, panel.title, panel.unit, look, named=bool(names) and panel is panels[0])
    save(canvas, path, look)


def _width_in(groups: Mapping[str, Mapping[str, float]]) -> float:
    return max(6.0, 1.5 + 0.28 * sum(len(bars) + 1 for bars in groups.values()))


def _bars(axes: Any, groups: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Draw them; the names that a legend has."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    width = 0.8 / max(len(names), 1)
    for number, name in enumerate(names):
        heights = {at: bars[name] for at, bars in enumerate(groups.values()) if name in bars}
        axes.bar([at + (number - (len(names) - 1) / 2) * width for at in heights], list(heights.values()), width, label=name,
                 color=COLORS[number % len(COLORS)])
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    return names


def draw_lines(
    path: Path, title: str, x_unit: str, y_unit: str, series: list[Series], logarithmic: bool = False, look: Look = PLAIN
) -> None:
    """Lines over one axis; both axes to powers of two where `logarithmic`."""
    canvas = figure(7, 4.5, look)
    axes = canvas.subplots()
    for number, line in enumerate(series):
        points = sorted(line.points.items())
        axes.plot([x for x, _ in points], [y for _, y in points], line.style, label=line.name, color=COLORS[number % len(COLORS)])
    xs = sorted({x for line in series for x in line.points})
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.set_xlabel(x_unit)
    _finish(canvas, axes, path, title, y_unit, look, named=bool(series))


def _finish(canvas: Any, axes: Any, path: Path, title: str, y_unit: str, look: Look, *, named: bool) -> None:
    _label(axes, title, y_unit, look, named=named)
    save(canvas, path, look)


def _label(axes: Any, title: str, y_unit: str, look: Look, *, named: bool) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(y_unit)
    if named:
        legend(axes, look)
    dress(axes, look)
