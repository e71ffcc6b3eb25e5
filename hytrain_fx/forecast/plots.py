"""The figures of an offline report as plotly's JSON: a page lets them be hovered and zoomed.

Step by k, by tokens and by size, memory by tier, and the timeline of our plan's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.forecast.memory import DEVICE_SHARE, HOST_SHARE
from hytrain_fx.forecast.report import Report
from hytrain_fx.forecast.sweep import Point
from hytrain_fx.forecast.systems import SYSTEMS
from hytrain_fx.ir.schedule import Interval
from hytrain_fx.ir.task_graph import Resource, TaskKind

LANES = {Resource.GPU: "GPU", Resource.D2H: "copies to the host", Resource.CPU: "CPU", Resource.H2D: "copies to the GPU",
         Resource.COLLECTIVES: "collectives"}
LOOKS = {
    TaskKind.BACKWARD: ("backward", "#9ecae9"), TaskKind.FORWARD: ("next forward", "#4c78a8"),
    TaskKind.D2H: ("gradients", "#f2cf5b"), TaskKind.CPU_UPDATE: ("update by the CPU", "#54a24b"),
    TaskKind.GPU_UPDATE: ("update on the GPU", "#e45756"), TaskKind.H2D: ("new weights", "#b279a2"),
    TaskKind.STREAM_IN: ("states in", "#d8b5a5"), TaskKind.STREAM_OUT: ("states out", "#9d755d"),
    TaskKind.RECEIVE: ("waiting for another stage", "#d7d7d7"),
    TaskKind.FETCH_FORWARD: ("weights, for the forward", "#ff9da6"), TaskKind.FETCH_BACKWARD: ("weights, for the backward", "#d6a5c9"),
    TaskKind.GATHER_FORWARD: ("shards, for the forward", "#7b6888"), TaskKind.GATHER_BACKWARD: ("shards, for the backward", "#c9bdd3"),
    TaskKind.REDUCE_SCATTER: ("reduce-scatter", "#bab0ac"), TaskKind.ALL_GATHER: ("all-gather", "#79706e"),
}
TIERS = {
    "GPU": (("weights", "weights_bytes"), ("gradients", "gradients_bytes"), ("optimizer states", "gpu_states_bytes"),
            ("activations", "activations_bytes")),
    "host": (("optimizer states", "host_states_bytes"), ("gradients and weights in transit", "host_slots_bytes")),
}
_FINEST = 1 / 1500  # share of the step: what is nearer is drawn as one bar


@dataclass(frozen=True, slots=True)
class Plot:
    """A title and the JSON text of plotly's figure."""

    title: str
    json: str


def plotly() -> Any:
    """The package. Raises UnsupportedError where it is not installed."""
    try:
        import plotly.graph_objects
        import plotly.offline
    except ImportError as error:
        raise UnsupportedError("a page with figures needs plotly: pip install hytrain-fx[report], or ask for Markdown or JSON") from error
    return plotly


def plots(report: Report) -> Iterator[Plot]:
    """All figures, in reading order. Raises UnsupportedError where plotly is not installed."""
    go = plotly().graph_objects
    if report.sweep.ks:
        yield _plot(go, "Step by k, the units whose states rest on the GPU", _by_k(go, report), "k", "s a step")
    lanes = [lane for resource, lane in LANES.items() if resource is not Resource.COLLECTIVES or report.profile.has_collectives]
    yield _plot(go, "Timeline of our plan's step", _timeline(go, report),
                "ms from the start of a backward to the end of the next forward", "", barmode="overlay",
                yaxis={"categoryorder": "array", "categoryarray": lanes[::-1]})
    for tier, usable in (("GPU", DEVICE_SHARE * report.device.memory_bytes), ("host", HOST_SHARE * report.device.host_memory_bytes)):
        limit = {"type": "line", "x0": usable / 1e9, "x1": usable / 1e9, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dash"}}
        yield _plot(go, f"Memory of the {tier} by system; dashed: what can be used", _memory(go, report, tier), f"GB of the {tier}", "",
                    barmode="stack", shapes=[limit], yaxis={"autorange": "reversed"})
    per_step = "step / forward and backward"
    if report.sweep.tokens:
        made = _sweep(go, report.sweep.tokens, lambda p: p.tokens)
        yield _plot(go, f"Step by {report.counted} in a micro-batch", made, report.counted, per_step, xaxis={"type": "log"})
    if report.sweep.sizes:
        made = _sweep(go, report.sweep.sizes, lambda p: p.params / 1e9)
        yield _plot(go, "Step by size of the model: more of the same layers", made, "G parameters", per_step, xaxis={"type": "log"})


def _plot(go: Any, title: str, traces: Sequence[Any], x: str, y: str, **layout: Any) -> Plot:
    axes = {name: {"title": {"text": text}, "automargin": True, "gridcolor": "#e5e5e5", **layout.pop(name, {})}
            for name, text in (("xaxis", x), ("yaxis", y))}
    margin = {"l": 10, "r": 10, "t": 20, "b": 10}
    return Plot(title, go.Figure(list(traces), {"template": "none", "margin": margin, "height": 380, **axes, **layout}).to_json())


def _by_k(go: Any, report: Report) -> list[Any]:
    """One curve, and our plan's own point on top; open marks do not fit."""
    points = report.sweep.ks
    curve = go.Scatter(
        x=[p.k for p in points], y=[p.step_us / 1e6 for p in points], name="nothing streamed", mode="lines+markers",
        marker={"symbol": [_symbol(p.fits) for p in points]}, customdata=[p.device_bytes / 1e9 for p in points],
        hovertemplate="k = %{x}: %{y:.4g} s, %{customdata:.4g} GB on the GPU")
    ours = report.ours
    own = go.Scatter(x=[ours.k], y=[ours.step_us / 1e6], name="our plan", mode="markers", marker={"size": 13, "symbol": _symbol(ours.fits)},
                     hovertemplate="k = %{x}: %{y:.4g} s")
    return [curve, own]


def _timeline(go: Any, report: Report) -> list[Any]:
    schedule = simulate(report.profile, report.plan)
    drawn: dict[TaskKind, list[tuple[str, float, float]]] = {kind: [] for kind in LOOKS}
    for resource, lane in LANES.items():
        for kind, bars in _bars_of(schedule.on(resource), _FINEST * schedule.makespan_us).items():
            drawn[kind] += [(lane, start / 1e3, (end - start) / 1e3) for start, end in bars]
    return [go.Bar(y=[lane for lane, _, _ in bars], base=[start for _, start, _ in bars], x=[lasts for _, _, lasts in bars],
                   orientation="h", name=LOOKS[kind][0], marker={"color": LOOKS[kind][1], "line": {"width": 0}},
                   hovertemplate="from %{base:.4g} ms, for %{x:.4g} ms")
            for kind, bars in drawn.items() if bars]


def _memory(go: Any, report: Report, tier: str) -> list[Any]:
    names = [row.system for row in report.rows]
    return [go.Bar(y=names, x=[getattr(row.memory, name) / 1e9 for row in report.rows], name=label, orientation="h",
                   hovertemplate="%{y}: %{x:.4g} GB")
            for label, name in TIERS[tier]]


def _sweep(go: Any, points: Sequence[Point], x_of: Callable[[Point], float]) -> list[Any]:
    """One curve a system; open marks do not fit."""
    return [go.Scatter(x=[x_of(p) for p in points], y=[p.steps_us[system.name] / p.compute_us for p in points], name=system.name,
                       mode="lines+markers", marker={"symbol": [_symbol(p.fits[system.name]) for p in points]},
                       customdata=[p.steps_us[system.name] / 1e6 for p in points], hovertemplate="%{x}: %{customdata:.4g} s a step")
            for system in SYSTEMS]


def _symbol(fits: bool) -> str:
    return "circle" if fits else "circle-open"


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
