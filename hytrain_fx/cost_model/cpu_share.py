"""How many sequences of a batch the CPU should train beside the device.

A step ends when the last of its resources has done its part. With m of n sequences on the CPU:

    device        device_us (n - m) / n
    cores         update_us + begin_us + m cpu_sequence_us           (m = 0: update_us)
    host memory   host_us + share_host_us + m sequence_host_us       (m = 0: host_us)

    step(m) = around_us + max of the three + join_us                 (m = 0: without join_us)

The cores stand once: what trains a sequence does not update meanwhile. m is the one with the
shortest step, in whole sequences; 0 where that gains less than LEAST_GAIN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hytrain_fx.errors import ConfigError
from hytrain_fx.ir.figures import time_text

LEAST_GAIN: Final = 0.01
"""Share of the step that the CPU's part must save: less is within the noise of steps."""


@dataclass(frozen=True, slots=True)
class ShareTimes:
    """What one step takes of each resource, in microseconds.

    sequences         of the batch
    device_us         forward and backward of all of them on the device
    cpu_sequence_us   of one of them on the CPU, by all cores that train
    begin_us          before the CPU begins its part: it launches the device's, and waits for
                      weights
    update_us         updates by the same cores
    join_us           after both: the CPU's gradients are added to the device's
    around_us         the rest of the step, with neither at work
    host_us           host memory: what updates and their copies move
    share_host_us     the same: what any part of the CPU's moves, whatever its size
    sequence_host_us  the same: what each of its sequences moves
    """

    sequences: int
    device_us: float
    cpu_sequence_us: float
    begin_us: float = 0.0
    update_us: float = 0.0
    join_us: float = 0.0
    around_us: float = 0.0
    host_us: float = 0.0
    share_host_us: float = 0.0
    sequence_host_us: float = 0.0

    def rows_us(self, by_cpu: int) -> dict[str, float]:
        """By resource: how long it is at work where the CPU trains so many sequences."""
        some = by_cpu > 0
        return {
            "the device": self.device_us * (self.sequences - by_cpu) / self.sequences,
            "the cores": self.update_us + some * self.begin_us + by_cpu * self.cpu_sequence_us,
            "host memory": self.host_us + some * self.share_host_us + by_cpu * self.sequence_host_us,
        }

    def step_us(self, by_cpu: int) -> float:
        """The length of the step."""
        return self.around_us + max(self.rows_us(by_cpu).values()) + (self.join_us if by_cpu else 0.0)

    def binds(self, by_cpu: int) -> str:
        """The resource that is at work for longest."""
        rows = self.rows_us(by_cpu)
        return max(rows, key=rows.__getitem__)


@dataclass(frozen=True, slots=True)
class CpuShare:
    """A solved share. Its text is one sentence, with the numbers.

    by_cpu       sequences that the CPU trains
    sequences    of the batch
    step_us      the step then
    without_us   the step without it
    best         sequences of the best share, were its gain enough
    best_us      the step with these
    binds        what the best share's step waits for
    """

    by_cpu: int
    sequences: int
    step_us: float
    without_us: float
    best: int
    best_us: float
    binds: str

    @property
    def gain(self) -> float:
        """Share of the step that is saved."""
        return 1.0 - self.step_us / self.without_us if self.without_us else 0.0

    def __str__(self) -> str:
        if self.by_cpu:
            return (f"the CPU trains {self.by_cpu} of {self.sequences} sequences: {time_text(self.step_us)} a step instead of "
                    f"{time_text(self.without_us)} ({self.gain:.1%} less); what takes longest: {self.binds}")
        if not self.best:
            return f"the CPU trains none of {self.sequences} sequences: {time_text(self.without_us)} a step is the least"
        return (f"the CPU trains none of {self.sequences} sequences: with {self.best} the step would take {time_text(self.best_us)} "
                f"instead of {time_text(self.without_us)}, and at least {LEAST_GAIN:.0%} less is asked for")


def best_share(times: ShareTimes) -> CpuShare:
    """The share with the shortest step; 0 where it gains less than LEAST_GAIN.

    The device keeps one sequence at least. Raises ConfigError for a batch without sequences and for
    times that are negative.
    """
    if times.sequences < 1:
        raise ConfigError(f"found a batch of {times.sequences} sequences, expected 1 or more")
    figures = (times.device_us, times.cpu_sequence_us, times.begin_us, times.update_us, times.join_us, times.around_us, times.host_us,
               times.share_host_us, times.sequence_host_us)
    if not all(0 <= us < float("inf") for us in figures):
        raise ConfigError(f"found times of {figures}, expected microseconds >= 0")
    best = min(range(1, times.sequences), key=times.step_us, default=0)
    return answer(times, best, times.step_us(0))


def answer(times: ShareTimes, best: int, without_us: float) -> CpuShare:
    """The best share where it pays, else 0.

    best         sequences of the best share, of a step as `times` has it
    without_us   the step without a share, of any kind
    """
    best_us = times.step_us(best)
    pays = best > 0 and best_us <= (1 - LEAST_GAIN) * without_us
    return CpuShare(best if pays else 0, times.sequences, best_us if pays else without_us, without_us, best, best_us, times.binds(best))
