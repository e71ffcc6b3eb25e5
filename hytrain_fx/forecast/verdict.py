"""The report in five lines: does it fit, what a step takes, what binds, what to change first."""

from __future__ import annotations

from hytrain_fx.forecast.changes import LEAST_GAIN, Change, first_changes
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.memory import DEVICE_SHARE, HOST_SHARE, Footprint
from hytrain_fx.forecast.report import Report
from hytrain_fx.forecast.shapes import Counted
from hytrain_fx.forecast.systems import ALL_ON_DEVICE, Row
from hytrain_fx.ir.figures import bytes_text, count_text, time_text

BUSY = {"cpu": "updates by the CPU", "d2h": "copies to the host", "h2d": "copies to the GPU",
        "collectives": "collectives between the GPUs", "host_memory": "the host memory's bandwidth"}
HARDLY = 0.02  # of the step: what is waited for less than this does not bind


def verdict(report: Report) -> tuple[str, ...]:
    """The lines, each one statement with its units."""
    return _fits(report), _all_on_device(report), _ours(report), _binds(report), _change(report)


def _fits(report: Report) -> str:
    memory, device = report.ours.memory, report.device
    if report.ours.fits:
        return fits_line(memory.device_bytes, device.memory_bytes, memory.host_bytes, device.host_memory_bytes)
    return over_line(memory, device)


def over_line(memory: Footprint, device: DeviceSpec) -> str:
    """What our plan takes of a memory that does not hold it."""
    return f"It does not fit: our plan takes {_over(memory, device)}."


def fits_line(gpu_bytes: float, of_gpu_bytes: float, host_bytes: float, of_host_bytes: float) -> str:
    """What our plan takes of both memories that hold it."""
    return (f"It fits: our plan takes {bytes_text(gpu_bytes)} of {bytes_text(of_gpu_bytes)} on the GPU and "
            f"{bytes_text(host_bytes)} of {bytes_text(of_host_bytes)} on the host.")


def _over(memory: Footprint, device: DeviceSpec) -> str:
    tiers = (("the GPU", memory.device_bytes, DEVICE_SHARE * device.memory_bytes),
             ("the host", memory.host_bytes, HOST_SHARE * device.host_memory_bytes))
    return " and ".join(f"{bytes_text(taken)} on {tier}, of which {bytes_text(usable)} can be used" for tier, taken, usable in tiers
                        if taken > usable)


def _all_on_device(report: Report) -> str:
    row = next(row for row in report.rows if row.system == ALL_ON_DEVICE)
    pace = _pace(report, row)
    if row.fits:
        return everything_fits_line(row.memory.device_bytes, pace, too=report.ours.fits)
    return f"With everything on the GPU it does not fit: it would take {_over(row.memory, report.device)}. It would be {pace}."


def everything_fits_line(gpu_bytes: float | None, pace: str, *, too: bool, tier: str = "the GPU") -> str:
    """What a step takes with everything on the GPU; `too`: our plan fits as well."""
    taken = "" if gpu_bytes is None else f", in {bytes_text(gpu_bytes)}"
    return f"With everything on {tier} it fits{' too' if too else ''}{taken}: {pace}."


def _ours(report: Report) -> str:
    row = report.ours
    return our_line(_pace(report, row), row.step_us / report.compute_us, row.k, len(report.profile.units), row.stream_share,
                    "Predicted, not measured.")


def our_line(pace: str, over_compute: float, k: int, units: int, stream_share: float, source: str, tier: str = "the GPU") -> str:
    """What a step takes by our plan, and where it has the states."""
    streamed = f", {stream_share:.0%} of the others' visit it" if stream_share else ""
    return (f"Our plan: {pace}, {over_compute:.2f} times forward and backward alone. The states of "
            f"{k} of {units} units rest on {tier}{streamed}. {source}")


def _pace(report: Report, row: Row) -> str:
    return pace_text(row.step_us, report.counted_per_step, report.counted)


def pace_text(step_us: float, tokens: int, counted: Counted) -> str:
    """A step's time, and what it gets through."""
    return f"{time_text(step_us)} a step, {count_text(1e6 * tokens / step_us)} {counted} a second"


def _binds(report: Report) -> str:
    row = report.ours
    if row.stall_us > HARDLY * row.step_us:
        busiest = min((name for name in BUSY if name in row.idle_shares), key=row.idle_shares.__getitem__)
        return (f"What binds: {BUSY[busiest]}, busy for {1 - row.idle_shares[busiest]:.0%} of the step. The GPU waits "
                f"{time_text(row.stall_us)} of it.")
    updates_us = row.step_us - row.stall_us - report.compute_us
    if updates_us > HARDLY * row.step_us:
        return f"What binds: the GPU, with forward and backward and {time_text(updates_us)} of updates of its own."
    return "What binds: the GPU's forward and backward. All updates are hidden."


def _change(report: Report) -> str:
    fits = report.ours.fits
    found = first_changes(report.changes, fits)
    if not found:
        return (f"Change first: nothing that was tried gives {LEAST_GAIN:.0%} more {report.counted} a second." if fits
                else "Change first: no single change that was tried makes it fit. Take a smaller model, or a larger machine.")
    return f"Change first: {'; on the machine: '.join(_effect(change, fits, report.counted) for change in found)}."


def _effect(change: Change, fits: bool, counted: str) -> str:
    effect = f"{change.gain:+.0%} {counted} a second" if fits else f"then it fits, at {time_text(change.step_us)} a step"
    return f"{change.words} ({effect})"
