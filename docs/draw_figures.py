"""Draw the figures of README.md and docs/ from recorded data, in light and in dark.

    python -m docs.draw_figures [--out docs/figures] [NAME ...]
    python -m docs.draw_figures --record barrier.json ours.json
        --heading "a 3.1 G parameter Llama on one H200, 8192 tokens a step"

Each function of `FIGURES` draws one figure. What was measured stands in docs/data/, one file a
figure, and each file names the page that has the same numbers. What is predicted, simulated or
estimated is computed here by the cost model, and the figure says so.

`--record` writes docs/data/before_after.json from the Chrome traces of two runs on one machine:

    python -m benchmarks steps ours 3b --option k=0 --option stream=0 --barrier
        --timeline barrier.json
    python -m benchmarks steps ours 3b --option gpu_states=0.0 --timeline ours.json

It takes the last whole step of each, from the begin of the device's backward to the begin of the
next one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch

from benchmarks.estimates import spec_of
from benchmarks.figures import estimates_and_trials
from benchmarks.plots import Look, Series, draw_bars, draw_lines, dress, figure, legend, save
from benchmarks.results import Results
from hytrain_fx.cost_model.cpu_share import ShareTimes
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import plan
from hytrain_fx.cost_model.rules import compare
from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.explain.timeline.span import union
from hytrain_fx.explain.timeline.timeline import Timeline, read_trace
from hytrain_fx.forecast.cpu_share import on_host, solved_together
from hytrain_fx.forecast.device import analytic_profile
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.report import case_of
from hytrain_fx.forecast.shapes import read_shape
from hytrain_fx.forecast.stages import pipeline_forecast
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.schedule import Schedule
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM
from hytrain_fx.ir.task_graph import Resource, TaskKind

HERE = Path(__file__).parent
DATA = HERE / "data"
LOOKS = {"light": Look(dpi=200), "dark": Look("#0d1117", "#e6edf3", "#3d444d", dpi=200)}
OURS, GPU, ZERO = "#54a24b", "#4c78a8", "#e45756"
COLOURS = {
    "backward": "#9ecae9", "forward": "#4c78a8", "wait": "#e45756", "update on the CPU": OURS, "update on the GPU": "#a6d854",
    "gradients": "#f2cf5b", "new weights": "#b279a2", "states": "#ff9da6", "launching, weights to the CPU": "#bab0ac",
    "the CPU trains": "#f58518", "gradients are added": "#f2cf5b",
}
KINDS = {
    TaskKind.BACKWARD: "backward", TaskKind.FORWARD: "forward", TaskKind.WAIT: "wait", TaskKind.CPU_UPDATE: "update on the CPU",
    TaskKind.GPU_UPDATE: "update on the GPU", TaskKind.D2H: "gradients", TaskKind.H2D: "new weights",
    TaskKind.STREAM_IN: "states", TaskKind.STREAM_OUT: "states",
}
NAMES = {"all_gpu": "PyTorch, all on the GPU", "zero_offload": "DeepSpeed ZeRO-Offload", "ours": "hytrain_fx"}
MODEL, DEVICE, TOKENS, SEQUENCE = "llama-3.1b", "h200", 8192, 2048

Bar = tuple[float, float, str]  # begin and end in ms, and a key of COLOURS


@dataclass(frozen=True)
class Lanes:
    """One step: its title, its length in ms, and the bars of each lane."""

    title: str
    step_ms: float
    lanes: dict[str, list[Bar]]


def read(name: str) -> dict[str, Any]:
    """What docs/data/ has for one figure."""
    found: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return found


# ---- measured ----


def before_after(path: Path, look: Look) -> None:
    """Two measured steps on one scale, one with a barrier after the backward."""
    data = read("before_after")
    draw_lanes(path, f"Measured: {data['what']}", steps_of(data), look)


def step_by_k(path: Path, look: Look) -> None:
    """Step time against the number of units that are updated on the GPU."""
    data, profile = read("step_by_k"), _profile()
    plans = [plan(profile, k=k) for k in range(len(profile.units) + 1)]
    canvas = figure(8, 4, look)
    axes = canvas.subplots()
    axes.plot([row["k"] for row in data["rows"]], [1e3 * row["seconds"] for row in data["rows"]], "o", color=ZERO, markersize=8,
              label=f"measured, run {data['run']} (at the right: everything on the GPU)")
    predicted_ms = [one.predicted["step_us"] / 1e3 for one in plans]
    axes.plot(range(len(plans)), predicted_ms, "-", color=OURS, label="predicted from the rates of one H200")
    axes.axhline(1e3 * data["floor"], linestyle="--", color=GPU, label="forward and backward alone, measured")
    solved = compare(profile)
    for rule, height in (("windowed", 0.82), ("seed", 0.72), ("cotrain", 0.92)):
        axes.axvline(solved[rule].k, color=look.ink, linewidth=0.8, linestyle=":")
        axes.annotate(f"k = {solved[rule].k}: {_RULES[rule]}", (solved[rule].k, height), xycoords=("data", "axes fraction"),
                      xytext=(5, 0), textcoords="offset points", color=look.ink, fontsize=8,
                      bbox={"facecolor": look.paper, "edgecolor": "none", "pad": 1})
    axes.set_ylim(0, 800)
    axes.set_xlabel("k: units updated on the GPU", fontsize=9)
    axes.set_ylabel("ms a step", fontsize=9)
    axes.set_title(data["what"], fontsize=9)
    legend(canvas, look, loc="outside lower center", ncols=2)
    dress(axes, look)
    save(canvas, path, look)


_RULES = {"windowed": "the windows of each layer", "seed": "HyTrainDNN's equation", "cotrain": "CoTrain's equation"}


def throughput(path: Path, look: Look) -> None:
    """Tokens in a second by model and batch, beside peers."""
    data = read("throughput")
    groups = {_group(row): {name: row["tokens"] / row["seconds"][mode] for mode, name in NAMES.items() if mode in row["seconds"]}
              for row in data["rows"]}
    draw_bars(path, f"Measured: {data['what']}", "tokens/s", groups, look, size=(8, 4))


def idle(path: Path, look: Look) -> None:
    """Share of a step in which the GPU runs no kernel."""
    data = read("throughput")
    groups = {_group(row): {name: row["idle_percent"][mode] for mode, name in NAMES.items()}
              for row in data["rows"] if "idle_percent" in row}
    draw_bars(path, f"Measured: GPU idle time in a step (no kernel runs), run {data['run']}", "% of the step", groups, look, size=(8, 4))


def sweep(path: Path, look: Look) -> None:
    """Measured and predicted steps of one model by tokens, beside the floor."""
    rows = [row for row in read("throughput")["rows"] if row["model"] == "1.35 G"]
    draw_lines(path, "1.35 G parameters, every state on the host: step time by tokens", "tokens", "seconds a step", [
        Series("measured", {row["tokens"]: row["seconds"]["ours"] for row in rows}, "o"),
        Series("predicted", {row["tokens"]: row["predicted"] for row in rows}, "-"),
        Series("forward and backward alone, measured", {row["tokens"]: row["seconds"]["floor"] for row in rows}, "--"),
    ], logarithmic=True, look=look)


def memory(path: Path, look: Look) -> None:
    """Memory of the device against the size of the model."""
    data = read("memory")
    points = {row["mode"]: {float(size): gb for size, gb in row["points"].items()} for row in data["rows"]}
    canvas = figure(8, 4.6, look)
    axes = canvas.subplots()
    floor = points["floor"]
    axes.plot(list(floor), [gb + STATE_BYTES_PER_PARAM * size for size, gb in floor.items()], "--", color=GPU,
              label="everything on the GPU, estimated (12 bytes a parameter)")
    for mode, style, colour, name in (
        ("all_gpu", "o", GPU, "everything on the GPU"), ("most", "s", OURS, "hytrain_fx, 53 % of the states on the GPU"),
        ("quarter", "D", OURS, "hytrain_fx, 25 % of the states on the GPU"), ("on_host", "o", OURS, "hytrain_fx, every state on the host"),
        ("zero_offload", "x", ZERO, "DeepSpeed ZeRO-Offload"), ("floor", ".-", look.ink, "forward and backward alone"),
    ):
        axes.plot(list(points[mode]), list(points[mode].values()), style, color=colour, label=name)
    axes.axhline(data["device_gb"], color=ZERO, linewidth=1, linestyle=":")
    axes.text(1.2, data["device_gb"] + 3, f"one H200 has {data['device_gb']} GB", fontsize=8, color=look.ink)
    axes.set_ylim(0, 205)
    axes.set_xlabel("G parameters", fontsize=9)
    axes.set_ylabel("peak GB on the device", fontsize=9)
    axes.set_title("Measured, except where said: Llama shapes in bf16, 8192 tokens a step", fontsize=9)
    legend(canvas, look, fontsize=7, loc="outside lower center", ncols=2)
    dress(axes, look)
    save(canvas, path, look)


# ---- simulated and estimated ----


def overlap(path: Path, look: Look) -> None:
    """Three simulated steps: one with barriers, two of ours."""
    profile, barrier = _profile(), Discipline(barrier="zero_offload")
    solved = plan(profile, rule="seed", discipline=Discipline())
    schedules = {
        "Before (as ZeRO-Offload): every state on the host; backward, copies, updates in turn":
            simulate(profile, plan(profile, k=0, discipline=barrier), barrier),
        "hytrain_fx, k = 0: every state on the host": simulate(profile, plan(profile, k=0)),
        f"hytrain_fx, k solved: states of {solved.k} of {len(profile.units)} units on the GPU": simulate(profile, solved),
    }
    steps = [Lanes(f"{title}: {schedule.makespan_us / 1e3:.0f} ms a step", schedule.makespan_us / 1e3, _lanes_of(schedule))
             for title, schedule in schedules.items()]
    draw_lanes(path, f"Simulated, not measured: {MODEL} on one {DEVICE.upper()}, {TOKENS} tokens a step", steps, look)


def largest(path: Path, look: Look) -> None:
    """The largest model by batch, estimated from bytes by tier."""
    lines = estimates_and_trials(spec_of(DEVICE), [1, 2, 4, 8, 16], SEQUENCE, Results(DATA / "no trials"))
    draw_lines(path, "Largest model by batch, estimated from bytes by tier", f"sequences of {SEQUENCE}", "G parameters", lines, look=look)


def pipeline(path: Path, look: Look) -> None:
    """What updates make of a 1F1B step, by the share of it in which a stage is idle."""
    profile = analytic_profile(read_shape("llama-7b"), find_device(DEVICE), SEQUENCE, sequence=SEQUENCE)
    stages = 4
    made = {(stages - 1) / (count + stages - 1): pipeline_forecast(profile, stages, count) for count in (4, 6, 8, 12, 16, 32, 64)}
    ways = ("after the step, by the CPU", "beside the step, by the CPU", "all states on the GPUs", "k solved")
    styles = ("x--", "s--", ".:", "o-")
    lines = [Series(name, {float(round(100 * idle)): of.steps_us[way] / of.compute_us for idle, of in made.items()}, style)
             for way, (name, style) in enumerate(zip(ways, styles, strict=True))]
    draw_lines(path, f"Calculated: a Llama of 6.7 G as {stages} stages, each on one {DEVICE.upper()} with 16 cores",
               "% of the step in which a stage is idle (4 to 64 micro-batches)", "step over the step without updates", lines, look=look)


def stages(path: Path, look: Look) -> None:
    """A predicted step of four stages, with few micro-batches and with many."""
    profile = analytic_profile(read_shape("llama-7b"), find_device(DEVICE), SEQUENCE, sequence=SEQUENCE)
    made = {count: pipeline_forecast(profile, 4, count) for count in (4, 16)}
    steps = [Lanes(f"{count} micro-batches: {of.steps_us[3] / 1e3:.0f} ms a step; updates after the step: {of.steps_us[0] / 1e3:.0f} ms",
                   of.timeline.length_us / 1e3, {lane: _bars(spans) for lane, spans in of.timeline.lanes.items()})
             for count, of in made.items()]
    draw_lanes(path, f"Predicted, not measured: a Llama of 6.7 G as 4 stages in 1F1B, each on one {DEVICE.upper()}, k solved", steps, look,
               since="where the last stage has ended the step before")


def share(path: Path, look: Look) -> None:
    """A predicted step without the CPU's share of the batch, and with it."""
    card, cores, tokens = "rtx4090", 64, 32768
    case = case_of(MODEL, on_host(find_device(card), cores), tokens, sequence=SEQUENCE, recompute=True)
    found = solved_together(case, cores)
    count, all_of_it = found.share.by_cpu, found.share.sequences
    ways = {0: "The GPU trains the whole batch", count: f"The CPU trains {count} of {all_of_it} sequences"}
    steps = [Lanes(f"{title}: {found.times.step_us(by_cpu) / 1e3:.0f} ms a step", found.times.step_us(by_cpu) / 1e3,
                   _lanes_of_share(found.times, by_cpu, case.profile)) for by_cpu, title in ways.items()]
    draw_lanes(path, f"Predicted, not measured: {MODEL} on one {card.upper()} with {cores} cores, {tokens} tokens a step", steps, look,
               since="the begin of the step")


FIGURES: dict[str, Callable[[Path, Look], None]] = {
    one.__name__: one for one in (before_after, step_by_k, throughput, memory, idle, sweep, overlap, largest, pipeline, stages, share)
}


# ---- parts ----


def steps_of(data: dict[str, Any]) -> list[Lanes]:
    """The two steps of docs/data/before_after.json."""
    titles = {"before": "Before: backward, then updates, then the forward",
              "after": "hytrain_fx: updates beside the backward and the forward"}
    return [Lanes(f"{title}: {data[name]['step_ms']} ms a step", data[name]["step_ms"], data[name]["lanes"])
            for name, title in titles.items()]


def draw_lanes(path: Path, heading: str, steps: Sequence[Lanes], look: Look, since: str = "the begin of a backward") -> None:
    """Steps below one another on one scale."""
    heights = [len(step.lanes) for step in steps]
    canvas = figure(8, 0.9 + sum(0.24 * count + 0.45 for count in heights), look)
    plots = canvas.subplots(len(steps), 1, sharex=True, height_ratios=heights)
    for axes, step in zip(plots, steps, strict=True):
        for at, bars in enumerate(step.lanes.values()):
            axes.broken_barh([(begin, end - begin) for begin, end, _ in bars], (at - 0.4, 0.8), linewidth=0,
                             facecolors=[COLOURS[kind] for *_, kind in bars])
        axes.set_yticks(range(len(step.lanes)), list(step.lanes), fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(step.lanes) - 0.4, -0.6)
        axes.set_xlim(0, max(one.step_ms for one in steps))
        axes.axvline(step.step_ms, color=look.ink, linewidth=0.8)
        axes.set_title(step.title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        dress(axes, look)
    plots[-1].set_xlabel(f"ms from {since}", fontsize=8)
    seen = {kind for step in steps for bars in step.lanes.values() for *_, kind in bars}
    legend(canvas, look, handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in seen],
           loc="outside lower center", ncols=4)
    canvas.suptitle(heading, fontsize=9, color=look.ink)
    save(canvas, path, look)


def _profile() -> Profile:
    return analytic_profile(read_shape(MODEL), find_device(DEVICE), TOKENS, sequence=SEQUENCE)


def _group(row: dict[str, Any]) -> str:
    return f"{row['model']}\n{row['tokens'] // SEQUENCE} x {SEQUENCE}"


def _lanes_of_share(times: ShareTimes, by_cpu: int, profile: Profile) -> dict[str, list[Bar]]:
    """What the GPU and the cores do, in turn; what both wait for is at the step's end."""
    of_gpu = (times.sequences - by_cpu) / times.sequences / 1e3
    forward_ms = of_gpu * profile.forward_us
    parts = (("update on the CPU", times.update_us), ("launching, weights to the CPU", times.begin_us if by_cpu else 0.0),
             ("the CPU trains", by_cpu * times.cpu_sequence_us))
    cores, at_ms = list[Bar](), 0.0
    for kind, us in parts:
        cores += [(at_ms, at_ms + us / 1e3, kind)] if us else []
        at_ms += us / 1e3
    both_ms = max(times.rows_us(by_cpu).values()) / 1e3
    joined = [(both_ms, both_ms + times.join_us / 1e3, "gradients are added")] if by_cpu else []
    of_device = [(0.0, forward_ms, "forward"), (forward_ms, forward_ms + of_gpu * profile.backward_us, "backward")]
    return {"GPU": of_device, "cores": cores + joined}


def _lanes_of(schedule: Schedule) -> dict[str, list[Bar]]:
    names = {Resource.GPU: "GPU", Resource.CPU: "CPU", Resource.D2H: "to the host", Resource.H2D: "to the GPU"}
    return {name: [(i.start_us / 1e3, i.end_us / 1e3, KINDS[i.task.kind]) for i in schedule.intervals if i.resource is resource]
            for resource, name in names.items()}


# ---- recording ----


def record(traces: Sequence[Path], heading: str, out: Path) -> None:
    """Write the data of `before_after` from the traces of two runs."""
    steps = [next(one for one in read_trace(path) if one.source == "measured").last_step() for path in traces]
    parts = {name: {"step_ms": round(step.length_us / 1e3), "lanes": lanes_of(step)}
             for name, step in zip(("before", "after"), steps, strict=True)}
    out.write_text(json.dumps({"what": heading} | parts, indent=1) + "\n")


def lanes_of(step: Timeline) -> dict[str, list[Bar]]:
    """The lanes that the figure has; CPU workers are one."""
    workers = [spans for lane, spans in step.lanes.items() if lane.startswith("CPU ")]
    wanted = {"device": "GPU", "device updates": "updates on the GPU", "D2H": "gradients to the host", "D2H states": "states to the host",
              "H2D": "weights to the GPU", "H2D states": "states to the GPU"}
    found = {"GPU": _bars(step.lanes.get("device", ()))}
    found[f"CPU, {len(workers)} threads"] = _bars(span for spans in workers for span in spans)
    return found | {name: _bars(step.lanes[lane]) for lane, name in wanted.items() if lane in step.lanes and name != "GPU"}


def _bars(spans: Iterable[Any]) -> list[Bar]:
    """Spans of one kind that touch are one bar."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        by_kind.setdefault(KINDS[span.kind], []).append((round(span.begin_us / 1e3, 1), round(span.end_us / 1e3, 1)))
    return sorted((begin, end, kind) for kind, pairs in by_kind.items() for begin, end in union(pairs))


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line; draw or record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*FIGURES, []], default=[], metavar="NAME", help=f"of {', '.join(FIGURES)}; none: all")
    parser.add_argument("--out", type=Path, default=HERE / "figures")
    parser.add_argument("--record", type=Path, nargs=2, metavar=("BARRIER", "OURS"), help="two traces")
    parser.add_argument("--heading", default="", help="with --record: model, machine, tokens")
    parser.add_argument("--data", type=Path, default=DATA / "before_after.json", help="with --record: the file to write")
    parsed = parser.parse_args(arguments)
    if parsed.record:
        record(parsed.record, parsed.heading, parsed.data)
        return 0
    parsed.out.mkdir(parents=True, exist_ok=True)
    for name in parsed.names or FIGURES:
        for which, look in LOOKS.items():
            FIGURES[name](parsed.out / f"{name}-{which}.png", look)
    return 0


if __name__ == "__main__":
    sys.exit(main())
