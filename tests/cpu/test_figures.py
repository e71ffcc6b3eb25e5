"""The figures of docs/ are those that one script draws, from numbers that the pages have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import draw_figures

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "figures"
PNG = b"\x89PNG"
LARGEST_BYTES = 300_000
TABLES = ("throughput", "step_by_k", "memory")  # what docs/data has besides a timeline


def test_every_figure_is_drawn_by_the_script_in_light_and_in_dark() -> None:
    """The folder has what the script draws, and nothing else; each file is small."""
    drawn = {f"{name}-{look}.png" for name in draw_figures.FIGURES for look in draw_figures.LOOKS}
    assert {path.name for path in FOLDER.iterdir()} == drawn
    assert {path.name for path in FOLDER.iterdir() if path.stat().st_size > LARGEST_BYTES} == set()


@pytest.mark.parametrize("name", draw_figures.FIGURES)
def test_the_script_draws_what_it_lists(name: str, tmp_path: Path) -> None:
    """Each figure is made from what the repository has."""
    draw_figures.FIGURES[name](tmp_path / "one.png", draw_figures.LOOKS["dark"])
    assert (tmp_path / "one.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", TABLES)
def test_every_measured_number_of_a_figure_stands_on_its_page(name: str) -> None:
    """What is drawn as measured is what the page says; its run is named there."""
    data = draw_figures.read(name)
    pages = "".join((ROOT / "docs" / page).read_text() for page in re.findall(r"\w+\.md", data["page"]))
    known = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", pages)}
    assert list(numbers_in(data["rows"]))
    assert {number for number in numbers_in(data["rows"]) if number not in known} == set()
    assert all(re.search(rf"\b{run}\b", pages) for run in data["run"].split(", "))


def test_the_timeline_has_the_steps_that_its_page_has() -> None:
    """Its lengths are those of the text.

    No bar leaves its step, and bars of a lane do not overlap.
    """
    data = draw_figures.read("before_after")
    page = (ROOT / "docs" / data["page"]).read_text()
    for step in draw_figures.steps_of(data):
        assert re.search(rf"\b{step.step_ms / 1e3:.3f}\b|\b{step.step_ms:.0f} ms\b", page), step.title
        for bars in step.lanes.values():
            ends = [0.0, *(end for _, end, _ in bars)]
            assert all(before <= begin < end <= step.step_ms for before, (begin, end, _) in zip(ends, bars, strict=False))
            assert {kind for *_, kind in bars} <= set(draw_figures.COLOURS)


def numbers_in(value: object) -> Iterator[float]:
    """Every number below, those that are keys too."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if re.fullmatch(r"[\d.]+", key):
                yield float(key)
            yield from numbers_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers_in(inner)
    elif isinstance(value, int | float):
        yield float(value)


def test_data_files_say_what_they_are() -> None:
    """Each names its page, its run and what was run."""
    for path in draw_figures.DATA.glob("*.json"):
        assert {"page", "run", "what"} <= set(json.loads(path.read_text())), path.name
