"""A profile of the running program: forward and backward from marks, updates and copies from the engine's records.

Rows whose kind of update did not run in the measured steps (a row on the device has no CPU update) are given the rate of those that did;
the device's rate is measured on a probe row of its own when no row rests there.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import psutil
import torch

from hytrain_fx.errors import PlanError
from hytrain_fx.ir.profile import Profile, UnitProfile
from hytrain_fx.runtime.engine import Stage, TaskRecord

if TYPE_CHECKING:
    from hytrain_fx.session import Session


def build_profile(session: Session, steps: int) -> Profile:
    """Measured costs per unit, in forward order; the engine's records are those of `steps` steps. The session must be drained.

    Raises PlanError when no step was measured.
    """
    units = session.planning.units()
    if session.marks.steps == 0 or steps == 0:
        raise PlanError("no training step has been measured yet: run more steps before solving a plan")
    times = session.marks.median(len(units))
    records = session.engine.take_records()
    spent = _us_by_unit(records, session.nodes.unit_of, session.engine.workers, steps)
    params = [unit.params for unit in units]
    cpu = _fill(spent[Stage.CPU_UPDATE], params, lambda: 0.0)
    gpu = _fill(spent[Stage.GPU_UPDATE], params, session.probe_device_update_us_per_param)
    d2h = _fill(spent[Stage.D2H], params, lambda: 0.0)
    h2d = _fill(spent[Stage.H2D], params, lambda: 0.0)
    profiles = tuple(
        UnitProfile(u.index, u.name, u.params, u.grad_bytes, times.forward_us[i], times.backward_us[i], cpu[i], gpu[i], d2h[i], h2d[i])
        for i, u in enumerate(units)
    )
    cuda = session.table.device.type == "cuda"
    return Profile(
        profiles,
        device=torch.cuda.get_device_name(session.table.device) if cuda else "cpu",
        host=f"{platform.processor() or platform.machine()}, {psutil.cpu_count(logical=False)} cores, {session.engine.workers} workers",
        versions={"torch": str(torch.__version__), "python": platform.python_version()},
        peak_bytes=torch.cuda.max_memory_allocated(session.table.device) if cuda else None,
        free_device_bytes=torch.cuda.mem_get_info(session.table.device)[0] if cuda else None,
        steps=session.marks.steps,
    )


def _us_by_unit(records: Sequence[TaskRecord], unit_of: Sequence[int], workers: int, steps: int) -> dict[Stage, dict[int, float]]:
    """Microseconds per step that each unit kept each stage busy; CPU workers run side by side, so theirs is divided among them."""
    spent: dict[Stage, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for record in records:
        if record.row >= len(unit_of):
            continue  # the probe row
        share = workers if record.stage is Stage.CPU_UPDATE else 1
        spent[record.stage][unit_of[record.row]] += (record.end_us - record.begin_us) / share / steps
    return spent


def _fill(spent: dict[int, float], params: Sequence[int], rate: Callable[[], float]) -> list[float]:
    """Time of every unit: its own where measured, else its size at the measured rate, else at `rate()` microseconds a parameter."""
    measured = sum(params[unit] for unit in spent)
    us_per_param = sum(spent.values()) / measured if measured else rate()
    return [spent.get(unit, us_per_param * params[unit]) for unit in range(len(params))]
