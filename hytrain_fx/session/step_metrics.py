"""What the last step took and where states are, as flat numbers for a logger.

    metrics(model)      {"step_seconds": 0.31, "exposed_seconds": 0.004, "k_units": 3, ...}

Read from counters and clocks that are kept anyway: nothing waits for the device, and nothing is
planned. A figure that is not known, or not measured here, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from hytrain_fx.ir.plan import Placement
from hytrain_fx.session.session import Session


@dataclass(frozen=True, slots=True)
class Metric:
    """What a figure says; a counter only grows, a gauge goes up and down."""

    kind: Literal["gauge", "counter"]
    meaning: str


METRICS: Final[Mapping[str, Metric]] = {
    "step_seconds": Metric("gauge", "wall time between the last two calls of step()"),
    "step_call_seconds": Metric("gauge", "how long the last call of step() took"),
    "exposed_seconds": Metric("gauge", "how long the device waited for new weights in the newest step that it is through with"),
    "k_units": Metric("gauge", "units whose states rest on the device"),
    "resident_share": Metric("gauge", "share of the parameters whose states rest on the device"),
    "streamed_share": Metric("gauge", "share of the parameters whose states visit the device to be updated"),
    "host_share": Metric("gauge", "share of the parameters that the CPU updates"),
    "device_state_bytes": Metric("gauge", "device memory that states take"),
    "host_state_bytes": Metric("gauge", "host memory that states, slots for gradients and new weights take"),
    "steps_done": Metric("counter", "calls of step(), those that were left out included"),
    "steps_skipped": Metric("counter", "steps that were left out: gradients were not finite (on_nonfinite), or GradScaler found them so"),
    "steps_captured": Metric("counter", "steps with a captured backward"),
    "gpu_energy_joules": Metric("counter", "energy of the GPU's board, by NVML, since it was first asked for"),
    "cpu_energy_joules": Metric("counter", "energy of the CPU packages, by RAPL, since it was first asked for"),
}
"""Every key, in the order of `step_metrics`."""


def step_metrics(session: Session, *, energy: bool) -> dict[str, float]:
    """The figures that are known now, by their names in METRICS."""
    found: dict[str, float] = {}
    if session.step_us:
        found["step_seconds"] = session.step_us[-1] / 1e6
    if session.steps_done:
        found["step_call_seconds"] = session.in_step_us / 1e6
    exposed_us = session.marks.last_stall_us()
    if exposed_us is not None:
        found["exposed_seconds"] = exposed_us / 1e6
    tiers = session.resources.tiers()
    found |= {
        "k_units": session.planning.plan.k,
        "resident_share": tiers.shares[Placement.GPU],
        "streamed_share": tiers.shares[Placement.STREAM],
        "host_share": tiers.shares[Placement.CPU],
        "device_state_bytes": tiers.device_bytes,
        "host_state_bytes": tiers.host_bytes,
        "steps_done": session.steps_done,
        "steps_skipped": session.builder.left_out,
        "steps_captured": session.planning.captured_steps,
    }
    if energy:
        found |= {f"{tier}_energy_joules": joules for tier, joules in session.resources.joules().items()}
    return found
