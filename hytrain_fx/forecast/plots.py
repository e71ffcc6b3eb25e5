"""The plots of an offline report as SVG text.

Steps, memory by tier, the chosen plan's timeline, and the sweeps.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.forecast.memory import DEVICE_SHARE, HOST_SHARE
from hytrain_fx.forecast.report import Report
from hytrain_fx.forecast.sweep import Point
from hytrain_fx.forecast.systems import OURS, SYSTEMS
from hytrain_fx.ir.schedule import Interval
from hytrain_fx.ir.task_graph import Resource, TaskKind

COLOURS = ("#4c78a8", "#9d755d", "#f2cf5b", "#e45756", "#76b7b2", "#54a24b", "#b279a2", "#7f7f7f")
LANES = {Resource.GPU: "device", Resource.D2H: "to the host", Resource.CPU: "CPU", Resource.H2D: "to the device"}
LOOKS = {
    TaskKind.BACKWARD: ("backward", "#9ecae9"), TaskKind.FORWARD: ("next forward", "#4c78a8"),
    TaskKind.D2H: ("gradients", "#f2cf5b"), TaskKind.CPU_UPDATE: ("update on the CPU", "#54a24b"),
    TaskKind.GPU_UPDATE: ("update on the device", "#e45756"), TaskKind.H2D: ("new weights", "#b279a2"),
    TaskKind.STREAM_IN: ("states in", "#d8b5a5"), TaskKind.STREAM_OUT: ("states out", "#9d755d"),
}
_FINEST = 1 / 1500  # share of the step: what is nearer is drawn as one bar
_RC: dict[Any, Any] = {"svg.fonttype": "none", "font.size": 9}


@dataclass(frozen=True, slots=True)
class Plot:
    """A title and an SVG element."""

    title: str
    svg: str


def plots(report: Report) -> Iterator[Plot]:
    """All plots, in reading order. Raises UnsupportedError where matplotlib is not installed."""
    systems = len(report.rows)
    yield _drawn("Step by system", (9, 1.4 + 0.36 * systems), lambda figure: _steps(figure, report))
    yield _drawn("The chosen plan, one step", (9, 2.8), lambda figure: _timeline(figure, report))
    yield _drawn("Memory by system", (9, 1.6 + 0.36 * systems), lambda figure: _memory(figure, report))
    if len(report.sweep.tokens) > 1:
        yield _drawn("Step over forward and backward, by tokens in a micro-batch", (9, 3.8),
                     lambda figure: _sweep(figure, report.sweep.tokens, "tokens in a micro-batch", lambda p: p.tokens))
    if len(report.sweep.sizes) > 1:
        yield _drawn("Step over forward and backward, by size of the model", (9, 3.8),
                     lambda figure: _sweep(figure, report.sweep.sizes, "G parameters", lambda p: p.params / 1e9))


def _drawn(title: str, inches: tuple[float, float], draw: Callable[[Any], None]) -> Plot:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("a page with plots needs matplotlib: pip install matplotlib, or ask for Markdown or JSON") from error
    # ids of two plots on one page must differ
    with matplotlib.rc_context(_RC | {"svg.hashsalt": title}):
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return Plot(title, re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL))


def _steps(figure: Any, report: Report) -> None:
    axes = figure.subplots()
    names = [row.system + ("" if row.fits else " (does not fit)") for row in report.rows]
    left = [0.0] * len(names)
    computing = [report.compute_us / 1e6] * len(names)
    updates = [max(row.step_us - row.stall_us - report.compute_us, 0.0) / 1e6 for row in report.rows]
    waits = [row.stall_us / 1e6 for row in report.rows]
    for label, seconds, colour in (("forward and backward", computing, COLOURS[0]), ("updates on the device", updates, COLOURS[3]),
                                   ("the device waits", waits, "#d0d0d0")):
        axes.barh(range(len(names)), seconds, left=left, label=label, color=colour)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    for at, row in enumerate(report.rows):
        axes.text(left[at], at, f" {row.step_us / 1e6:.3g} s, k = {row.k}", va="center")
    axes.set_xlim(0, 1.25 * max(left))
    _bars(axes, names, "seconds a step")


def _memory(figure: Any, report: Report) -> None:
    device, host = figure.subplots(1, 2, sharey=True)
    of_device = (("weights", "weights_bytes"), ("gradients", "gradients_bytes"), ("states", "gpu_states_bytes"),
                 ("activations", "activations_bytes"))
    of_host = (("states", "host_states_bytes"), ("slots", "host_slots_bytes"))
    spec = report.device
    for axes, parts, limit, title in ((device, of_device, DEVICE_SHARE * spec.memory_bytes, "device"),
                                      (host, of_host, HOST_SHARE * spec.host_memory_bytes, "host")):
        left = [0.0] * len(report.rows)
        for number, (label, name) in enumerate(parts):
            sizes = [getattr(row.memory, name) / 1e9 for row in report.rows]
            axes.barh(range(len(sizes)), sizes, left=left, label=label, color=COLOURS[number if axes is device else number + 4])
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        axes.axvline(limit / 1e9, color="black", linewidth=1, label="may be used")
        _bars(axes, [row.system for row in report.rows], f"GB of the {title}")
    host.invert_yaxis()  # shared with the device's, which _bars has turned already


def _bars(axes: Any, names: Sequence[str], unit: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _timeline(figure: Any, report: Report) -> None:
    schedule = simulate(report.profile, report.plan)
    axes = figure.subplots()
    used: dict[TaskKind, Any] = {}
    for y, resource in enumerate(LANES):
        for kind, bars in _bars_of(schedule.on(resource), _FINEST * schedule.makespan_us).items():
            spans = [(start / 1e3, (end - start) / 1e3) for start, end in bars]
            used.setdefault(kind, axes.broken_barh(spans, (y - 0.4, 0.8), facecolors=LOOKS[kind][1], linewidth=0))
    axes.set_yticks(range(len(LANES)), list(LANES.values()))
    axes.invert_yaxis()
    axes.set_xlim(0, schedule.makespan_us / 1e3)
    axes.set_xlabel("ms from the start of a backward to the end of the next forward")
    shown = [kind for kind in LOOKS if kind in used]
    figure.legend([used[kind] for kind in shown], [LOOKS[kind][0] for kind in shown], loc="outside upper left", ncols=len(shown) // 2 or 1,
                  fontsize=8, frameon=False)


def _bars_of(intervals: Sequence[Interval], finest_us: float) -> dict[TaskKind, list[tuple[float, float]]]:
    """Bars by kind of task.

    A gap too small to see is closed where nothing of another kind stands in it.
    """
    bars: dict[TaskKind, list[tuple[float, float]]] = {}
    last: TaskKind | None = None
    for piece in intervals:
        kind = piece.task.kind
        of_kind = bars.setdefault(kind, [])
        if last is kind and of_kind and piece.start_us - of_kind[-1][1] < finest_us:
            of_kind[-1] = (of_kind[-1][0], piece.end_us)
        else:
            of_kind.append((piece.start_us, piece.end_us))
        last = kind
    return bars


def _sweep(figure: Any, points: Sequence[Point], unit: str, x_of: Callable[[Point], float]) -> None:
    axes = figure.subplots()
    xs = [x_of(p) for p in points]
    for system, colour in zip(SYSTEMS, COLOURS, strict=True):
        ys = [p.steps_us[system.name] / p.compute_us for p in points]
        axes.plot(xs, ys, color=colour, label=system.name, linewidth=2.4 if system.name == OURS else 1.2)
        for fits in (True, False):
            at = [i for i, p in enumerate(points) if p.fits[system.name] is fits]
            axes.plot([xs[i] for i in at], [ys[i] for i in at], "o", color=colour, fillstyle="full" if fits else "none", markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(xs, [f"{x:.3g}" if x < 1000 else f"{x:.0f}" for x in xs])
    axes.minorticks_off()
    axes.set_xlabel(f"{unit}; open marks: does not fit")
    axes.set_ylabel("step / (forward + backward)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
