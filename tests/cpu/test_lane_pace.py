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

    held_ms: float  # what the next forward waits for
    last_ms: float  # when all has come, after the backward
    planned_share: float  # of the rate that the lane has while the backward runs


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/native/lane_pace.cpp, compiled: the engine's plans and what it learns, played."""
    return built("lane_pace", tmp_path_factory.mktemp("pace"))


def steps(program: Path, **loop: float) -> list[Step]:
    """The steps of a loop with these values; the program has others."""
    words = [f"{name}={value}" for name, value in loop.items()]
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60, check=True)
    return [Step(*map(float, line.split())) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("share", [0.5, 0.6, 0.7])
def test_a_lane_that_is_behind_is_planned_to_be(program: Path, share: float) -> None:
    """Without that what the forward needs first stands behind what it needs later.

    The planned rate becomes what the lane has, and all comes about as soon as before.
    """
    first, *_, last = steps(program, share=share)
    assert last.planned_share == pytest.approx(1.0, abs=0.05)
    assert last.held_ms < 0.5 * first.held_ms
    assert last.last_ms < 1.02 * first.last_ms


@pytest.mark.parametrize("share", [0.9, 1.0, 1.3])
def test_a_lane_that_keeps_up_loses_nothing(program: Path, share: float) -> None:
    """Nor one that is faster in the backward than after it."""
    made = steps(program, share=share)
    assert max(of.held_ms for of in made) <= made[0].held_ms + 0.5
    assert max(of.last_ms for of in made) <= made[0].last_ms + 0.5


@pytest.mark.parametrize("share", [0.5, 0.7, 1.0, 1.3])
def test_the_planned_rate_settles(program: Path, share: float) -> None:
    """The last steps have nearly the same one: a faster lane is tried now and then."""
    last = [of.planned_share for of in steps(program, steps=60, share=share)[-20:]]
    assert max(last) <= 1.1 * min(last)


MUCH = {"visits": 3.0, "visit_mb": 47.0, "weight_mb": 29.0}
OTHER = {f"other_{name}": value for name, value in MUCH.items()}


@pytest.mark.parametrize("foreseen", [0.8, 0.9, 1.0, 1.25])
@pytest.mark.parametrize("late_us", [0.0, 13_000.0])
@pytest.mark.parametrize(("visit_mb", "weight_mb"), [(0.1, 1.0), (1.0, 1.0), (5.0, 5.0), (1.0, 50.0)])
def test_a_lane_with_time_to_spare_teaches_nothing_wrong(
    program: Path, visit_mb: float, weight_mb: float, late_us: float, foreseen: float
) -> None:
    """Most copies wait there for a gradient: how fast they follow one another is not the rate.

    However long that lasts, also where the lane is looked at late in each step and gradients come
    at other times than planned, a plan with much more to copy does what it does in a new loop.
    """
    loop = {"share": 0.5, "late_us": late_us, "foreseen": foreseen}
    new = steps(program, steps=20, **MUCH, **loop)
    little = {"visits": 1.0, "visit_mb": visit_mb, "weight_mb": weight_mb}
    made = steps(program, steps=170, other_at=150, other_share=0.5, **little, **OTHER, **loop)[150:]
    assert sum(of.held_ms for of in made) <= 1.05 * sum(of.held_ms for of in new)
    assert max(of.last_ms for of in made) <= max(of.last_ms for of in new) + 0.5


@pytest.mark.parametrize("visits", [3.0, 4.0, 5.0])
def test_a_lane_that_was_slow_is_found_to_be_fast_again(program: Path, visits: float) -> None:
    """A lane that was slow for a while, beside other work, is soon planned with its own rate again.

    What was planned for a slow lane takes as long on a fast one, as its copies wait for gradients.
    So a slow rate would stay for good, and half of the lane's time in the backward with it.
    """
    load = {"visits": visits, "visit_mb": 40.0, "weight_mb": 36.0}
    other = {f"other_{name}": value for name, value in load.items()}
    slow, fast = (steps(program, weights=6, share=share, **load)[-1].last_ms for share in (0.5, 1.0))
    after = steps(program, weights=6, share=0.5, steps=50, other_at=20, other_share=1, **load, **other)[-1].last_ms
    assert fast < 0.5 * slow
    assert after < fast + 0.1 * (slow - fast)


def test_a_rate_goes_back_where_nothing_can_be_learnt(program: Path) -> None:
    """A rate that is learnt from small visits leaves no room for a large one in a short backward.

    Nothing would be planned before its end, and what is not planned is not measured.
    """
    made = steps(program, unit_us=400, share=0.07, visits=1, visit_mb=2, weight_mb=1, steps=170, other_at=150, **OTHER)
    assert made[150].planned_share < 0.1
    assert made[-1].planned_share == pytest.approx(1.0, abs=0.05)
    assert made[-1].held_ms < 0.9 * made[150].held_ms


@pytest.fixture(scope="module")
def engine_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/native/late_lane.cpp, compiled: copies take nine times as long in the backward."""
    return built("late_lane", tmp_path_factory.mktemp("late"))


def visits(program: Path, streamed_of_unit: int) -> list[tuple[int, int]]:
    """Of each step: visits between the backward's end and unit 0, and visits before that end."""
    done = subprocess.run([program, str(streamed_of_unit)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = [(int(between), int(before)) for between, before in map(str.split, done.stdout.splitlines())]
    assert len(found) == 24
    return found


def test_the_engine_learns_how_slow_its_lane_is(engine_program: Path) -> None:
    """At first a dozen visits of later units come before the first unit's, later hardly any."""
    between = [of for of, _ in visits(engine_program, 3)]
    assert sum(between[1:7]) >= 12
    assert sum(between[-6:]) <= sum(between[1:7]) / 2, between


def test_states_stream_beside_the_backward_where_all_are_streamed(engine_program: Path) -> None:
    """No gradient lands on the host then, which would tell when states may be updated.

    In the order of units the lane would stand at the first ones, in all staging memory there is
    (6 visits), until the backward has ended.
    """
    found = visits(engine_program, 4)
    assert sum(before for _, before in found[1:]) > 2 * 6 * len(found[1:]), found
