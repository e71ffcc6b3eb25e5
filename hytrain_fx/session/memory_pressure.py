"""What gives way when the device's memory runs out, and comes back when it may be free again.

    before_call    before the loop calls the model: what is to give way does, or comes back. It
                   knows an error in the loop's own code, such as its loss, by the allocator's count
    repeats        a compiled forward has met torch.OutOfMemoryError: whether to call it again
    noticed        around a compiled backward: it cannot be called again, so the next forward is
                   prepared, and the error says so

Half of the states on the device go to the host, before the next forward that finds no gradient in
place, and weights that rest on the host come fewer units ahead. Gradients of a pipeline's stage no
longer gather on the device. What the options fix stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from hytrain_fx.errors import PlanError
from hytrain_fx.ir.figures import bytes_text
from hytrain_fx.planning.controller import Event
from hytrain_fx.planning.planning import Planning
from hytrain_fx.runtime.ranks import Ranks
from hytrain_fx.session.nodes import SessionNodes
from hytrain_fx.session.resources import Resources

LEAST_BYTES: Final = 64 << 20
"""States on the device that take less than this go as a whole."""
PATIENCE_STEPS: Final = 100
"""Steps after which the memory is taken to be free again; twice as many each time."""


@dataclass(frozen=True, slots=True)
class RandomNumbers:
    """Where the generators of the host and of the device stand."""

    host: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomNumbers:
        """As of this moment."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def again(self, device: torch.device) -> None:
        """Go back there."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


class MemoryPressure:
    """That of one session.

    times   how often memory ran out and something gave way
    """

    def __init__(self, planning: Planning, resources: Resources, nodes: SessionNodes, ranks: Ranks | None) -> None:
        self.times = 0
        self._planning = planning
        self._resources = resources
        self._nodes = nodes
        self._ranks = ranks
        self._device = nodes.table.device
        self._short_in: str | None = None  # what has met the error, and nothing has given way since
        self._errors_seen = _errors_of_allocator(self._device)
        self._since_step: int | None = None  # when states last gave way
        self._patience_steps = PATIENCE_STEPS

    def before_call(self) -> RandomNumbers | None:
        """Before a forward of the loop; what `repeats` wants, None where it would not repeat it."""
        if not torch.is_grad_enabled():
            return None
        if self._short_in is None and _errors_of_allocator(self._device) > self._errors_seen:
            self._short_in = "code outside the model"
        if self._short_in is not None:
            self._give_way()
        elif self._since_step is not None and self._planning.last.steps_done - self._since_step >= self._patience_steps:
            why = f"{self._patience_steps} steps after memory ran out it may be free again"
            self._planning.solver.most_bytes = None
            self._planning.do(self._planning.controller.hear(Event.ROOM, why))
            self._since_step, self._patience_steps = None, 2 * self._patience_steps
        return RandomNumbers.now(self._device) if self._may_give and self._is_repeatable else None

    @property
    def _is_repeatable(self) -> bool:
        """Only a graph has run when memory runs out: no code between graphs, no other rank."""
        capture = self._planning.units.capture
        return capture is not None and bool(capture.graphs) and not capture.breaks and not self._ranks

    @property
    def _may_give(self) -> bool:
        return self._states_bytes > 0 or self._nodes.fetched.slot_bytes > 0

    @property
    def _states_bytes(self) -> int:
        return self._resources.tiers().device_bytes

    # ---- when it has run out ----

    def repeats(self, begun: RandomNumbers | None, error: torch.OutOfMemoryError) -> bool:
        """A forward has met the error. If its repetition is exact and has more memory: go back.

        Else the error says what would help.
        """
        self._short_in = "a forward"
        if begun is None or self._nodes.gradients.any_in_place() or not self._give_way():
            self._say(error)
            return False
        begun.again(self._device)
        return True

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Around a compiled backward."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._short_in = "a backward"
            self._say(error)
            raise

    def _say(self, error: torch.OutOfMemoryError) -> None:
        """Add to the error what of ours is on the device, and what happens next or would help."""
        there = [f"{bytes_text(nbytes)} of {what}" for nbytes, what in
                 ((self._states_bytes, "optimizer states"), (self._nodes.fetched.slot_bytes, "slots for weights")) if nbytes]
        told = f"hytrain_fx has {' and '.join(there) or 'nothing of its own'} on the device. "
        if self._states_bytes and self._planning.profile is not None and self._planning.solver.may_give_way:
            told += ("Before the next forward half of these states go to the host. Weights are as before this step: call "
                     "optimizer.zero_grad() and repeat it. ")
        told += "Smaller micro-batches and activation checkpointing take less"
        if self._states_bytes and not self._planning.solver.may_give_way:
            told += "; so does a smaller gpu_states, which the options fix here"
        error.add_note(told)

    def _give_way(self) -> bool:
        """Whether anything does, now or as a plan that the next forward puts in force."""
        where, self._short_in = self._short_in, None
        self._errors_seen = _errors_of_allocator(self._device)
        gives = self._fewer_states(f"memory ran out in {where} after {self._planning.last.steps_done} steps")
        gives |= self._fewer_slots()
        gives |= self._nodes.gradients.stream_out()
        torch.cuda.empty_cache()  # pieces of what was there lie between others
        self.times += gives
        return gives

    def _fewer_states(self, why: str) -> bool:
        planning, states_bytes = self._planning, self._states_bytes
        if planning.profile is None or not planning.solver.may_give_way or not states_bytes:
            return False
        if planning.solver.most_bytes is not None and states_bytes > planning.solver.most_bytes:
            return False  # the last move did not come about
        limit_bytes = planning.solver.most_bytes = states_bytes // 2 if states_bytes > LEAST_BYTES else 0
        why = f"{why}: {bytes_text(states_bytes - limit_bytes)} of states or more go to the host"
        try:
            fewer = planning.solver.solved(planning.profile, planning.guard, planning.discipline)
        except PlanError:
            return False  # the host has no room
        planning.do(planning.controller.hear(Event.LOST, why))  # what is being measured is of the plan before
        planning.want(fewer, why)
        self._since_step = planning.last.steps_done
        return True

    def _fewer_slots(self) -> bool:
        units = self._nodes.fetched
        if not units.slot_bytes or not units.ahead or self._ranks:
            return False
        units.look_ahead(units.ahead - 1)
        return True


def _errors_of_allocator(device: torch.device) -> int:
    """How often torch's allocator has run out of the device's memory in this process."""
    if device.type != "cuda":
        return 0
    count: int = torch.cuda.memory_stats_as_nested_dict(device).get("num_ooms", 0)  # nothing before its first use
    return count
