"""Jobs that run at once share the bandwidth of the host's memory.

Copies and updates that together want more than the memory gives all become slower by the same factor. On the measured H200 machine 14
threads of AdamW and copies both ways, 290 GB/s when each runs alone, gave 215 GB/s: AdamW at 0.73 and the copies at 0.76 of their rates.
"""

from __future__ import annotations

import heapq
import math

from hytrain_fx.cost_model.jobs import Job


class Running:
    """The jobs that run, each to its end; those that move host memory on a clock of their own.

    That clock is `slowness` times slower than real time while they want more bytes than the memory gives. Where its bandwidth is not known
    every job takes its own time.
    """

    def __init__(self, bytes_per_us: float | None) -> None:
        self._bytes_per_us = bytes_per_us
        self._alone: list[tuple[float, int, Job]] = []  # by real end
        self._sharing: list[tuple[float, int, Job]] = []  # by end on the clock below
        self._clock_us = 0.0
        self._started = 0

    def __bool__(self) -> bool:
        return bool(self._alone or self._sharing)

    @property
    def slowness(self) -> float:
        """Real microseconds for one of the sharing jobs' clock; 1 where the memory gives what all of them want."""
        if self._bytes_per_us is None:
            return 1.0
        return max(1.0, sum(job.host_bytes / job.us for _, _, job in self._sharing) / self._bytes_per_us)

    def start(self, job: Job, now_us: float) -> None:
        """Begin a job."""
        self._started += 1
        if self._bytes_per_us is not None and job.host_bytes and job.us:
            heapq.heappush(self._sharing, (self._clock_us + job.us, self._started, job))
        else:
            heapq.heappush(self._alone, (now_us + job.us, self._started, job))

    def until_next_end(self, now_us: float) -> tuple[float, list[Job]]:
        """When the next job ends, and all that end then, in order of their start."""
        slowness = self.slowness
        alone_us = self._alone[0][0] if self._alone else math.inf
        shared_us = now_us + (self._sharing[0][0] - self._clock_us) * slowness if self._sharing else math.inf
        end_us = min(alone_us, shared_us)
        self._clock_us = self._sharing[0][0] if shared_us <= alone_us else self._clock_us + (end_us - now_us) / slowness
        ended = [*_taken(self._alone, end_us), *_taken(self._sharing, self._clock_us)]
        return end_us, [job for _, _, job in sorted(ended, key=lambda entry: entry[1])]


def _taken(heap: list[tuple[float, int, Job]], until_us: float) -> list[tuple[float, int, Job]]:
    taken = []
    while heap and heap[0][0] <= until_us:
        taken.append(heapq.heappop(heap))
    return taken
