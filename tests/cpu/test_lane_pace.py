"""The first unit's weights come soon after the backward, also where copies are slower meanwhile.

Their gradients come last, and the lane to the device keeps to an order that was planned before.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from .native_programs import built


@dataclass(frozen=True)
class Step:
    """As tests/native/lane_pace.cpp prints it."""

    first_unit_ms: float  # after the backward
    last_ms: float
    idle_ms: float
    planned_share: float  # of the rate that the lane was seen to have


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/native/lane_pace.cpp, compiled: the engine's plan, played at other rates."""
    return built("lane_pace", tmp_path_factory.mktemp("pace"))


def steps(program: Path, share: float) -> list[Step]:
    """24 steps in whose backwards the lane has this share of the rate that it was seen to have."""
    done = subprocess.run([program, str(share)], capture_output=True, text=True, timeout=60, check=True)
    return [Step(*map(float, line.split())) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("share", [0.5, 0.6, 0.7])
def test_a_lane_that_is_behind_is_planned_to_be(program: Path, share: float) -> None:
    """Without that what the forward needs first stands behind what it needs later.

    The planned rate becomes what the lane has, and all comes as soon as before.
    """
    first, *_, last = steps(program, share)
    assert first.planned_share == 1.0
    assert last.planned_share == pytest.approx(share, rel=0.08)
    assert last.first_unit_ms < 0.6 * first.first_unit_ms
    assert last.last_ms < 1.01 * first.last_ms


@pytest.mark.parametrize("share", [0.9, 1.0, 1.3])
def test_a_lane_that_keeps_up_loses_nothing(program: Path, share: float) -> None:
    """Nor one that is faster in the backward than it was seen to be."""
    made = steps(program, share)
    assert max(of.first_unit_ms for of in made) <= made[0].first_unit_ms + 0.5
    assert max(of.last_ms for of in made) <= made[0].last_ms + 0.5


@pytest.mark.parametrize("share", [0.5, 0.7, 1.0, 1.3])
def test_the_planned_rate_settles(program: Path, share: float) -> None:
    """The last steps have the same one."""
    assert len({of.planned_share for of in steps(program, share)[-6:]}) == 1


def test_the_engine_learns_how_slow_its_lane_is(tmp_path: Path) -> None:
    """tests/native/late_lane.cpp: copies take nine times as long while the backward runs.

    At first a dozen visits of later units come before those of the first unit, later hardly any.
    """
    done = subprocess.run([built("late_lane", tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    before = list(map(int, done.stdout.split()))
    assert len(before) == 24
    assert sum(before[1:7]) >= 12
    assert sum(before[-6:]) <= sum(before[1:7]) / 2, before
