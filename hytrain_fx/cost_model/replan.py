"""Whether steps have changed, and whether states move for a new plan: decisions from values alone.

Measuring is expensive (a step of 7 G parameters is 20 000 records). The lengths of steps are known
anyway, and where they do not change no plan would gain. `planning/controller.py` decides when a
plan is solved again. The new one must be better by more than the noise of the numbers, and repay
the move, or plans flip back and forth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hytrain_fx.cost_model.planner import GUARD
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.limits import LEAST_GAIN_SHARE

HORIZON_STEPS = 200  # within so many steps a move must repay
LATEST = 3  # steps whose median is compared with the steps before
# shares of the step: a change followed at once, and one at a regular look
DRIFT, SHIFT = 0.10, 0.03
_MOST_GUARD = 1.5  # a few measured steps may say anything


@dataclass(frozen=True)
class Verdict:
    """Whether to move to a new plan, and the figures that decided it.

    They are in microseconds; `gain_us` is per step.
    """

    moves: bool
    gain_us: float
    noise_us: float
    migration_us: float

    def __str__(self) -> str:
        gain = f"the new plan is predicted to gain {time_text(self.gain_us)} a step (noise {time_text(self.noise_us)})"
        return f"{gain}, moving states takes {time_text(self.migration_us)}: {'moved' if self.moves else 'stayed'}"


def judge(present_us: float, new_us: float, steps_us: Sequence[float], migration_us: float) -> Verdict:
    """Whether to move from a plan of `present_us` a step to one of `new_us`.

    Both are predicted from one profile.

    steps_us       measured lengths of the steps the profile was made from: their standard error is
                   the noise
    migration_us   how long moving the states takes, once

    Raises PlanError for times below 0.
    """
    if min(present_us, new_us, migration_us, *steps_us, 0.0) < 0:
        raise PlanError(f"found {present_us}, {new_us} and {migration_us} us and steps of {list(steps_us)} us, expected times >= 0")
    noise_us = standard_error(steps_us) if steps_us else 0.0
    moves = should_replan(present_us, new_us, migration_us, HORIZON_STEPS, noise_us)
    return Verdict(moves, present_us - new_us, noise_us, migration_us)


def repays(present_us: float, new_us: float, cost_us: float) -> bool:
    """Whether steps of `new_us` instead of `present_us` repay a change within `HORIZON_STEPS`.

    `cost_us` is what the change holds the steps up by.
    """
    return (present_us - new_us) * HORIZON_STEPS > cost_us


def planning_guard(cpu_steps_us: Sequence[float]) -> float:
    """The factor on CPU update times to plan with.

    1 + two standard deviations of the CPU time of the measured steps, at least 5% and at most 50%.

    Deviations, and not errors of the median: each step whose updates take longer waits by itself,
    and none that is faster makes up for it. Two of them, as a unit too many on the device costs
    alpha (1/15 to 1/80) of what one too few costs in such a step: steps should be in time in 1 / (1
    + alpha) of all cases, 94 to 99%, the critical ratio of the newsvendor's problem.
    """
    middle_us = median(cpu_steps_us) if cpu_steps_us else 0.0
    if middle_us <= 0:
        return GUARD
    return min(max(GUARD, 1.0 + 2.0 * _deviation(cpu_steps_us) / middle_us), _MOST_GUARD)


def drifted(before_us: Sequence[float], latest_us: Sequence[float]) -> bool:
    """Whether steps have changed.

    The median of the `LATEST` last is off the median before by 10% and by three deviations. A
    single odd step changes no median, and noisy steps must differ by more.
    """
    if not before_us or len(latest_us) < LATEST:
        return False
    middle_us = median(before_us)
    return abs(median(latest_us[-LATEST:]) - middle_us) > max(DRIFT * middle_us, 3 * _deviation(before_us))


def shifted(before_us: Sequence[float], latest_us: Sequence[float]) -> bool:
    """Whether the median of all latest steps is off the one before.

    It must be off by 3% and by two standard errors of both.
    """
    if not before_us or len(latest_us) < LATEST:
        return False
    error_us = standard_error(before_us) + standard_error(latest_us)
    return _off_us(before_us, latest_us) > max(SHIFT * median(before_us), 2 * error_us)


def _off_us(before_us: Sequence[float], latest_us: Sequence[float]) -> float:
    return abs(median(latest_us) - median(before_us))


# ---- From noisy series to the numbers of a plan, and when a better plan is worth the move ----
#
# Times come with spikes, so the middle of the last few is taken. Rates are sums over sums, since a
# mean of ratios is biased.


NORMAL_MAD = 1.4826  # standard deviation over median absolute deviation, normal distribution
# standard error of a median over the mean's, normal distribution: sqrt(pi / 2)
MEDIAN_EFFICIENCY = 1.2533


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the median of these values. 0 for a single value."""
    return MEDIAN_EFFICIENCY * _deviation(values) / math.sqrt(len(values))


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation of these values, from the median absolute deviation."""
    middle = median(values)
    return NORMAL_MAD * median(abs(value - middle) for value in values)


def should_replan(
    current_us: float, new_us: float, migration_us: float, horizon_steps: int, standard_error_us: float = 0.0
) -> bool:
    """Whether to move from a plan of `current_us` a step to one of `new_us`.

    Both are predicted from the same numbers.

    The gain must exceed 1% of the step and two standard errors, and repay the move of states
    (`migration_us`) within `horizon_steps` steps: otherwise plans flip back and forth with the
    noise.
    """
    gain_us = current_us - new_us
    return gain_us > max(LEAST_GAIN_SHARE * current_us, 2.0 * standard_error_us) and gain_us * horizon_steps > migration_us
