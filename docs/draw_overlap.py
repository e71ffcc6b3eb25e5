"""Draw docs/overlap.png: three predicted training steps.

One has barriers after the backward, two are with hytrain_fx.

    python docs/draw_overlap.py [file.png]

Nothing is measured here: the profile comes from the rates of `forecast/device.py`, the schedules
from `cost_model/simulate.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import plan
from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.forecast.device import analytic_profile
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.shapes import read_shape
from hytrain_fx.ir.schedule import Schedule
from hytrain_fx.ir.task_graph import Resource, TaskKind

MODEL, DEVICE, TOKENS, SEQUENCE = "llama-3.1b", "h200", 8192, 2048
LANES = {Resource.GPU: "GPU", Resource.D2H: "copy to host", Resource.CPU: "CPU", Resource.H2D: "copy to GPU"}
LOOKS = {
    TaskKind.BACKWARD: ("backward", "#9ecae9"), TaskKind.FORWARD: ("next forward", "#4c78a8"),
    TaskKind.D2H: ("gradients", "#f2cf5b"), TaskKind.CPU_UPDATE: ("update on the CPU", "#54a24b"),
    TaskKind.GPU_UPDATE: ("update on the GPU", "#e45756"), TaskKind.H2D: ("new weights", "#b279a2"),
}


def schedules() -> dict[str, Schedule]:
    """Each predicted step under its title."""
    profile = analytic_profile(read_shape(MODEL), find_device(DEVICE), TOKENS, sequence=SEQUENCE)
    barrier = Discipline(barrier="zero_offload")
    before = simulate(profile, plan(profile, k=0, discipline=barrier), barrier)
    on_host = simulate(profile, plan(profile, k=0))
    solved = plan(profile, rule="seed", discipline=Discipline())
    after = simulate(profile, solved)
    return {
        f"Before (as ZeRO-Offload): every state in host memory; backward, copies, updates in turn: {_step_text(before)}": before,
        f"hytrain_fx, k = 0: every state in host memory: {_step_text(on_host)}": on_host,
        f"hytrain_fx, k solved: states of {solved.k} of {len(profile.units)} units on the GPU: {_step_text(after)}": after,
    }


def draw(path: Path) -> None:
    """Write the picture (PNG) to `path`."""
    made = schedules()
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots(len(made), 1, sharex=True)
    for axis, (title, schedule) in zip(axes, made.items(), strict=True):
        _draw(axis, title, schedule)
    axes[-1].set_xlabel("ms from the start of a backward")
    figure.suptitle(f"Simulated, not measured: {MODEL} on one {DEVICE.upper()}, {TOKENS} tokens a step", fontsize=11)
    handles = [Patch(color=colour, label=name) for name, colour in LOOKS.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.savefig(path, format="png", dpi=130, metadata={"Software": None})


def _draw(axis: Any, title: str, schedule: Schedule) -> None:
    for y, resource in enumerate(LANES):
        pieces = [i for i in schedule.intervals if i.resource == resource]
        bars = [(i.start_us / 1e3, i.duration_us / 1e3) for i in pieces]
        axis.broken_barh(bars, (y - 0.4, 0.8), facecolors=[LOOKS[i.task.kind][1] for i in pieces], linewidth=0, snap=False)
    axis.axvline(schedule.makespan_us / 1e3, color="black", linewidth=0.8)
    axis.set_yticks(range(len(LANES)), list(LANES.values()), fontsize=8)
    axis.invert_yaxis()
    axis.set_title(title, loc="left", fontsize=9)


def _step_text(schedule: Schedule) -> str:
    return f"{schedule.makespan_us / 1e6:.2f} s a step"


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("overlap.png"))
