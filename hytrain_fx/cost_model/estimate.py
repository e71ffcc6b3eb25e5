"""From noisy series to the numbers a plan is solved from, and when a better plan is worth the move.

Times come with spikes, so the middle of the last few is taken; rates are sums over sums, as a mean of ratios is biased.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from hytrain_fx.errors import PlanError

WINDOW = 7
LEAST_GAIN = 0.01  # of the step: below that a plan's gain is not distinguishable from a flat optimum
NORMAL_MAD = 1.4826  # standard deviation over median absolute deviation, normal distribution
MEDIAN_EFFICIENCY = 1.2533  # standard error of a median over that of a mean, normal distribution: sqrt(pi / 2)


def median_of_last(values: Sequence[float], n: int = WINDOW, guard: float = 1.0) -> float:
    """`guard` times the median of the last `n` values (of all when there are fewer). Raises PlanError when there are none."""
    if not values or n < 1:
        raise PlanError(f"found {len(values)} measured values and a window of {n}, expected at least one of each")
    return guard * median(values[-n:])


def standard_error(values: Sequence[float], n: int = WINDOW) -> float:
    """Standard error of `median_of_last(values, n)`, from the median absolute deviation; 0 for a single value."""
    last = values[-n:]
    middle = median_of_last(values, n)
    return MEDIAN_EFFICIENCY * NORMAL_MAD * median(abs(value - middle) for value in last) / math.sqrt(len(last))


def guard_of(values: Sequence[float], n: int = WINDOW, least: float = 0.05) -> float:
    """The factor to plan with: 1 + the larger of `least` and 1.5 relative standard errors."""
    middle = median_of_last(values, n)
    return 1.0 + max(least, 1.5 * standard_error(values, n) / middle if middle > 0 else 0.0)


def ratio_of_sums(pairs: Iterable[tuple[float, float]]) -> float:
    """Sum of first over sum of second: the rate of a series of (time, bytes) pairs. Raises PlanError when the second sums to 0."""
    above = below = 0.0
    for numerator, denominator in pairs:
        above += numerator
        below += denominator
    if below <= 0:
        raise PlanError(f"found measured amounts that sum to {below}, expected more than 0")
    return above / below


def should_replan(
    current_us: float, new_us: float, migration_us: float, horizon_steps: int, standard_error_us: float = 0.0
) -> bool:
    """Whether to move from a plan of `current_us` a step to one of `new_us`, both predicted from the same numbers.

    The gain must exceed 1% of the step and two standard errors, and repay the move of states (`migration_us`) within
    `horizon_steps` steps: otherwise plans flip back and forth with the noise.
    """
    gain_us = current_us - new_us
    return gain_us > max(LEAST_GAIN * current_us, 2.0 * standard_error_us) and gain_us * horizon_steps > migration_us
