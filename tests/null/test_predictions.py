"""docs/predictions.md: the model's figures beside the measured ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_predictions", DOCS / "compare_predictions.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_model_gives_now(compare: ModuleType) -> None:
    """A change of the model changes the page: run `python docs/compare_predictions.py`."""
    assert (DOCS / "predictions.md").read_text() == compare.text()


def test_misses_are_as_large_as_the_page_says(compare: ModuleType) -> None:
    """At least thirteen steps are within 10%, none is off by more than a third, memory is within 6%."""
    near = 0
    for row in compare.ROWS:
        found = compare.predicted(row)
        assert 0.66 <= found.step_s / row.step_s <= 1.12
        near += abs(found.step_s / row.step_s - 1) <= 0.1
        for measured, predicted in ((row.device_gb, found.device_gb), (row.host_gb, found.host_gb)):
            assert measured is None or predicted == pytest.approx(measured, rel=0.06)
    assert near >= 13


def test_measured_figures_are_those_of_the_measurements(compare: ModuleType) -> None:
    """Every measured step stands in docs/measurements.md or beside the device's rate."""
    known = (DOCS / "measurements.md").read_text() + str(compare.find_device("h200").sources)
    assert all(f"{row.step_s:.3f}" in known for row in compare.ROWS)
