"""Energy of a run: counters that wrap, and reasons where there is none.

The powercap tree and NVML are made by hand.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.case import Case
from benchmarks.markdown import energy_table
from benchmarks.results import Results
from hytrain_fx.forecast.bench.energy import energy_fields
from hytrain_fx.runtime.energy import Counter, EnergyTotals, Meter, meter_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
UUID = "01234567-89ab-cdef-0123-456789abcdef"


class FakeNvmlError(Exception):
    """What NVML raises."""


class FakeNvml:
    """The part of pynvml that is used: one GPU whose counter shows `millijoules`."""

    NVMLError = FakeNvmlError

    def __init__(self, millijoules: int = 0) -> None:
        self.millijoules, self.begun, self.counts = millijoules, False, True

    def nvmlInit(self) -> None:
        self.begun = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if not self.begun or uuid != f"GPU-{UUID}":
            raise FakeNvmlError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if not self.counts:
            raise FakeNvmlError("Not Supported")
        return self.millijoules


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that its GPU has UUID."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))


def powercap_of(folder: Path, packages: dict[str, tuple[int, int]]) -> Path:
    """A powercap tree: package -> (count, range).

    Next to the packages are a core zone inside each, a psys zone, and the same packages over mmio.
    """
    for number, (name, (count, most)) in enumerate(packages.items()):
        for zone, label in ((f"intel-rapl:{number}", name), (f"intel-rapl:{number}:0", "core"), (f"intel-rapl-mmio:{number}", name)):
            write_zone(folder / zone, label, count, most)
    write_zone(folder / f"intel-rapl:{len(packages)}", "psys", 7, 1000)
    return folder


def write_zone(zone: Path, name: str, count: int, most: int) -> None:
    """The files of one zone."""
    zone.mkdir(parents=True, exist_ok=True)
    for file, value in (("name", name), ("energy_uj", count), ("max_energy_range_uj", most)):
        (zone / file).write_text(f"{value}\n")


@given(modulus=st.integers(2, 1 << 64), begin=st.integers(0, 1 << 64), spent=st.lists(st.integers(0, 1 << 64), min_size=1, max_size=5))
def test_a_counter_that_starts_again_gives_the_right_difference(modulus: int, begin: int, spent: list[int]) -> None:
    """A counter gives the right difference, wherever it begins and however often it wraps.

    Between two readings less than one range is spent.
    """
    spent = [amount % modulus for amount in spent]
    shown: Iterator[int] = iter([(begin + sum(spent[:reading])) % modulus for reading in range(len(spent) + 1)])
    counter = Counter(lambda: next(shown), 1.0, modulus)
    counts = [counter.count() for _ in range(len(spent) + 1)]
    assert [counter.spent_j(a, b) for a, b in itertools.pairwise(counts)] == [float(amount) for amount in spent]


def test_packages_are_counted_once_and_summed_over_a_wrap(tmp_path: Path) -> None:
    """Packages are counted once and summed, though one wraps.

    Their cores, the platform and the same packages over mmio do not count.
    """
    tree = powercap_of(tmp_path, {"package-0": (900_000, 1_000_000), "package-1": (0, 2_000_000)})
    meter = meter_of(CPU, tree)
    before = meter.read()
    powercap_of(tmp_path, {"package-0": (100_000, 1_000_000), "package-1": (600_000, 2_000_000)})
    row = energy_fields(meter, before, meter.read(), steps=4, tokens=10)
    assert row["cpu_joules_per_step"] == pytest.approx((0.2 + 0.6) / 4)
    assert row["cpu_joules_per_token"] == pytest.approx((0.2 + 0.6) / 40)
    assert (row["gpu_joules_per_step"], row["gpu_joules_per_token"]) == (None, None)
    assert row["energy_absent"] == {"gpu": "no GPU trains"}


@pytest.mark.usefixtures("one_gpu")
def test_the_gpu_is_found_by_its_uuid_and_counted_in_millijoules(tmp_path: Path) -> None:
    """GPU and packages have figures of their own; with both nothing is absent."""
    nvml = FakeNvml(5_000)
    meter = meter_of(GPU, powercap_of(tmp_path, {"package-0": (0, 10)}), nvml)
    before = meter.read()
    nvml.millijoules += 3_000
    assert energy_fields(meter, before, meter.read(), steps=2, tokens=5) == {
        "gpu_joules_per_step": 1.5, "gpu_joules_per_token": 0.3, "cpu_joules_per_step": 0.0, "cpu_joules_per_token": 0.0,
        "energy_absent": {}}


def test_totals_count_on_over_wraps_and_lost_readings(tmp_path: Path) -> None:
    """Totals begin at 0 and add up every difference, though the counter starts again twice.

    A tier that can no longer be read keeps its total.
    """
    shown = iter([90, 10, 30, 5])

    def count() -> int:
        return next(shown)

    totals = EnergyTotals(Meter({"gpu": (Counter(count, 1.0, 100),)}))
    assert [totals.joules() for _ in range(4)] == [{"gpu": 0.0}, {"gpu": 20.0}, {"gpu": 40.0}, {"gpu": 115.0}]
    tree = powercap_of(tmp_path, {"package-0": (0, 1_000_000)})
    totals = EnergyTotals(meter_of(CPU, tree))
    assert totals.joules() == {"cpu": 0.0}
    powercap_of(tmp_path, {"package-0": (500_000, 1_000_000)})
    assert totals.joules() == {"cpu": 0.5}
    (tree / "intel-rapl:0" / "energy_uj").unlink()
    assert totals.joules() == {"cpu": 0.5}


def test_no_powercap_is_told(tmp_path: Path) -> None:
    """Without RAPL the figure is null, and the reason has the folder that was looked into."""
    row = energy_fields(meter_of(CPU, tmp_path / "powercap"), {}, {}, 1, 1)
    assert row["cpu_joules_per_step"] is None
    assert str(tmp_path / "powercap") in row["energy_absent"]["cpu"]


def test_a_counter_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    """The reason names the file; reading it fails here because it is a folder."""
    tree = powercap_of(tmp_path, {"package-0": (0, 10)})
    (tree / "intel-rapl:0" / "energy_uj").unlink()
    (tree / "intel-rapl:0" / "energy_uj").mkdir()
    meter = meter_of(CPU, tree)
    assert meter.counters == {}
    assert "it needs root, or read access to" in meter.absent["cpu"]


def test_a_range_of_nothing_is_no_counter(tmp_path: Path) -> None:
    """A zone with a range of 0 would make every difference a division by 0."""
    assert "a range of 0 uJ" in meter_of(CPU, powercap_of(tmp_path, {"package-0": (0, 0)})).absent["cpu"]


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_that_nvml_does_not_count_is_told(tmp_path: Path) -> None:
    """An old GPU or a part of one, and one that NVML does not know: each has its own reason."""
    silent, lost = FakeNvml(), FakeNvml()
    silent.counts = False
    lost.nvmlInit = lambda: None  # type: ignore[method-assign]
    assert "does not count this GPU's energy: Not Supported" in meter_of(GPU, tmp_path, silent).absent["gpu"]
    assert "does not find this GPU: Not Found" in meter_of(GPU, tmp_path, lost).absent["gpu"]


def test_without_pynvml_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pynvml is optional: without it the reason says what to install."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in meter_of(GPU, tmp_path).absent["gpu"]


@pytest.mark.usefixtures("one_gpu")
def test_a_counter_lost_in_the_run_costs_the_figure_and_not_the_row(tmp_path: Path) -> None:
    """When a counter is lost in the run, the measured step times stay."""
    nvml = FakeNvml()
    meter = meter_of(GPU, tmp_path, nvml)
    before = meter.read()
    nvml.counts = False
    row = energy_fields(meter, before, meter.read(), 1, 1)
    assert row["gpu_joules_per_step"] is None
    assert row["energy_absent"]["gpu"] == "its counter could not be read any more"


def test_the_table_has_joules_or_the_reason(tmp_path: Path) -> None:
    """The table has joules a step and millijoules a token, or a dash and the reason.

    Rows without measured energy have no line.
    """
    results = Results(tmp_path / "results.json")
    meter = Meter({"gpu": (Counter(lambda: 0, 1.0, 100),)}, {"cpu": "no RAPL"})
    counted = energy_fields(meter, {"gpu": (90,)}, {"gpu": (10,)}, steps=10, tokens=8)
    for size, energy in (("1b", counted), ("3b", {})):
        case = Case("floor", size)
        row: dict[str, Any] = {**case.values(), "machine": {}, "step_s": 1.0, **energy}
        results.put(case, row)
    text = energy_table(results)
    assert "| `floor 1b 4x2048` | 2 | - | 250 | - | cpu: no RAPL |" in text
    assert "3b" not in text
