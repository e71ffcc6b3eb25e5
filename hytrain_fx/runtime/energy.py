"""Energy of the GPU (NVML) and of the CPU packages (RAPL).

The counters only grow, and start again when they are full.

    meter = meter_of(device)                  # what this machine counts; for the rest, why not
    before = meter.read();  ...steps...
    meter.spent_j(before, meter.read())       # joules by tier
    EnergyTotals(meter).joules()              # the same since it was first asked, however often

The whole board or package is counted, with idle power and other processes. The GPU's counter moves
about every 0.1 s. A package's counter is full after some 262 kJ, a quarter of an hour at 300 W. It
may start again once between two readings, so read at least that often.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

POWERCAP: Final = Path("/sys/class/powercap")
TIERS: Final = ("gpu", "cpu")
_NVML_COUNTS = 1 << 64
_PACKAGE = re.compile(r"intel-rapl:\d+")  # AMD's too; intel-rapl-mmio counts the same packages once more
Counts = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Counter:
    """`count()` now, in units of `joules`; after `modulus` - 1 it starts again at 0."""

    count: Callable[[], int]
    joules: float
    modulus: int

    def spent_j(self, before: int, after: int) -> float:
        """Joules between two counts, the counter having started again at most once."""
        return (after - before) % self.modulus * self.joules


@dataclass(frozen=True)
class Meter:
    """The counters of each tier ("gpu", "cpu"), and for a tier without any the reason."""

    counters: Mapping[str, tuple[Counter, ...]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)

    def read(self) -> dict[str, tuple[int, ...]]:
        """All counts now, without a tier that can no longer be read.

        The device's work must be done: NVML does not wait.
        """
        counts: dict[str, tuple[int, ...]] = {}
        for tier, counters in self.counters.items():
            with contextlib.suppress(_NoCounter):  # the step times are not lost for it
                counts[tier] = tuple(counter.count() for counter in counters)
        return counts

    def spent_j(self, before: Counts, after: Counts) -> dict[str, float]:
        """Joules between two readings, of each tier that both have."""
        return {tier: sum(c.spent_j(a, b) for c, a, b in zip(self.counters[tier], before[tier], after[tier], strict=True))
                for tier in TIERS if tier in before and tier in after}


class EnergyTotals:
    """What a meter has counted since this was first asked.

    Counters may start again in between, once from one call to the next.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._last: Counts = {}
        self._joules: dict[str, float] = {}

    def joules(self) -> dict[str, float]:
        """By tier: 0 at first. A tier that can no longer be read keeps what it had."""
        now = self._meter.read()
        spent = self._meter.spent_j(self._last, now)
        self._joules |= {tier: self._joules.get(tier, 0.0) + spent.get(tier, 0.0) for tier in now}
        self._last = {**self._last, **now}
        return dict(self._joules)


class _NoCounter(Exception):
    """Why a tier has none; kept in `Meter.absent`."""


def meter_of(device: torch.device, powercap: Path = POWERCAP, nvml: Any = None) -> Meter:
    """What counts energy here. `nvml` is the module pynvml.

    None: it is imported when a GPU trains.
    """
    counters: dict[str, tuple[Counter, ...]] = {}
    absent: dict[str, str] = {}
    finders: tuple[tuple[str, Callable[[], tuple[Counter, ...]]], ...] = (
        ("gpu", partial(gpu_counters, device, nvml)), ("cpu", partial(package_counters, powercap)))
    for tier, find in finders:
        try:
            found = find()
            for counter in found:
                counter.count()  # one that cannot be read is found now, not after the steps
            counters[tier] = found
        except _NoCounter as error:
            absent[tier] = str(error)
    return Meter(counters, absent)


def gpu_counters(device: torch.device, nvml: Any = None) -> tuple[Counter, ...]:
    """The counter of millijoules of the board that torch calls `device`.

    Raises _NoCounter where there is none.
    """
    if device.type != "cuda":
        raise _NoCounter("no GPU trains")
    try:
        nvml = import_module("pynvml") if nvml is None else nvml
    except ImportError as error:
        raise _NoCounter(f"NVML is not read: {error}; pip install nvidia-ml-py") from error
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # NVML's own numbers ignore CUDA_VISIBLE_DEVICES

    def count() -> int:
        try:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except nvml.NVMLError as error:
            raise _NoCounter(f"NVML does not count this GPU's energy: {error} (it needs Volta or newer, and a whole GPU)") from error

    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        raise _NoCounter(f"NVML does not find this GPU: {error}") from error
    return (Counter(count, 1e-3, _NVML_COUNTS),)


def package_counters(powercap: Path = POWERCAP) -> tuple[Counter, ...]:
    """The counters of microjoules of all CPU packages.

    Raises _NoCounter where there are none, or where they may not be read.
    """
    zones = sorted(zone for zone in powercap.glob("intel-rapl:*") if _PACKAGE.fullmatch(zone.name)) if powercap.is_dir() else []
    try:
        packages = [zone for zone in zones if (zone / "name").read_text().startswith("package")]
        if not packages:
            raise _NoCounter(f"no RAPL: {powercap} has no CPU packages (virtual machines seldom show them)")
        return tuple(_package(zone) for zone in packages)
    except (OSError, ValueError) as error:
        raise _NoCounter(f"RAPL cannot be read: {error}") from error


def _package(zone: Path) -> Counter:
    energy, most = zone / "energy_uj", int((zone / "max_energy_range_uj").read_text())
    if most <= 0:
        raise ValueError(f"{zone} has a range of {most} uJ, expected more than 0")

    def count() -> int:
        try:
            return int(energy.read_text())
        except (OSError, ValueError) as error:
            raise _NoCounter(f"RAPL cannot be read: {error}; it needs root, or read access to {energy}") from error

    return Counter(count, 1e-6, most)
