"""What ran when, as values.

Spans on the lanes of the launching thread, the device, what goes from rank to rank, fetches of
weights, each copy direction and each CPU worker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from hytrain_fx.explain.timeline.launching import StepLaunch
from hytrain_fx.explain.timeline.span import STAGE, Kind, Span, lane_order, share_inside
from hytrain_fx.ir.task_graph import TaskKind


@dataclass(frozen=True)
class Lanes:
    """Spans in order of begin, with the names of the units; times start at 0.

    launches    what the launching thread did in each step; measured only
    begins_us   when that 0 was, on the machine's clock; measured only
    """

    spans: tuple[Span, ...]
    unit_names: tuple[str, ...]
    source: Literal["measured", "predicted"]
    launches: tuple[StepLaunch, ...] = ()
    begins_us: float = 0.0

    @property
    def lanes(self) -> dict[str, tuple[Span, ...]]:
        """Spans by lane, in the order of `lane_order`."""
        order = sorted({span.lane for span in self.spans}, key=lane_order)
        return {lane: tuple(span for span in self.spans if span.lane == lane) for lane in order}

    @property
    def length_us(self) -> float:
        """From the first begin to the last end."""
        return max((span.end_us for span in self.spans), default=0.0)

    def busy_us(self, *kinds: Kind) -> float:
        """Time spent on tasks of these kinds, summed over lanes."""
        return sum(span.end_us - span.begin_us for span in self.spans if span.kind in kinds)

    @property
    def overlap_share(self) -> float | None:
        """Share 0..1 of the CPU updates' time that ran while the device computed.

        Forward and backward count; None without CPU updates, and for the stages of a pipeline.
        """
        if any(span.lane.startswith(STAGE) for span in self.spans):
            return None
        updates = [(s.begin_us, s.end_us) for s in self.spans if s.kind is TaskKind.CPU_UPDATE]
        computing = [(s.begin_us, s.end_us) for s in self.spans if s.kind in (TaskKind.FORWARD, TaskKind.BACKWARD)]
        return share_inside(updates, computing)

    @property
    def step_ended_at(self) -> float | None:
        """Share of the device's backward that was done when `optimizer.step()` returned.

        It is the largest of all steps.

        Below 0: it had not begun; above 1: it was over; None without a recorded step.
        """
        return max((launch.ended_at for launch in self.launches), default=None)

    @property
    def longest_launch_us(self) -> float | None:
        """What the launching thread's longest block before `optimizer.step()` was, at most.

        It is counted from the forward's last gate on. None without a step.
        """
        return max((launch.longest_us for launch in self.launches), default=None)

    def last_step(self) -> Self:
        """From the begin of the last backward but one to the begin of the last: as predicted lanes.

        All of it where fewer than two steps were recorded.
        """
        if len(self.launches) < 2:
            return self
        before, after = self.launches[-2:]
        begin_us, end_us = before.backward_begin_us, after.backward_begin_us
        cut = (replace(s, begin_us=max(s.begin_us, begin_us), end_us=min(s.end_us, end_us)) for s in self.spans)
        kept = tuple(span.moved(-begin_us) for span in cut if span.end_us > span.begin_us)
        return replace(self, spans=kept, launches=(before.moved(-begin_us),))

    def moved(self, by_us: float) -> Self:
        """The same, that much later."""
        spans, launches = (span.moved(by_us) for span in self.spans), (launch.moved(by_us) for launch in self.launches)
        return replace(self, spans=tuple(spans), launches=tuple(launches))
