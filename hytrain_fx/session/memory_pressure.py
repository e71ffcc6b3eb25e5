"""What gives way when the device's memory runs out, and comes back when it may be free again.

    before_call    before the loop calls the model: what is to give way does, or comes back
    repeats        a compiled forward has met torch.OutOfMemoryError: whether to call it again
    noticed        around a compiled backward: it cannot be called again, so the next forward is
                   prepared, and the error says so

Half of the states on the device go to the host, before the next forward that finds no gradient in
place, and weights that rest on the host come fewer units ahead. Gradients of a pipeline's stage no
longer gather on the device. Where none of these can give way, the weights that weights="auto" left
on the device are streamed. What the options fix stays.

An error in the loop's own code, such as its loss, comes by nothing of ours. The allocator's count
has it, and is read where the last forward was not followed by a backward and a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from hytrain_fx.ir.figures import bytes_text
from hytrain_fx.planning.planning import Planning
from hytrain_fx.runtime.ranks import Ranks
from hytrain_fx.session.giving_way import GivesWay, SlotsGiveWay, StatesGiveWay
from hytrain_fx.session.nodes import SessionNodes
from hytrain_fx.session.resources import Resources

PATIENCE_STEPS: Final = 100
"""Steps after which the memory is taken to be free again; twice as many each time."""


@dataclass(frozen=True, slots=True)
class RandomNumbers:
    """Where the generators of the host and of the device stand."""

    host: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomNumbers:
        """As of this moment. The device's seed and offset are on the host: nothing waits for it."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def again(self, device: torch.device) -> None:
        """Go back there."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


class MemoryPressure:
    """That of one session.

    times     how often memory ran out and something gave way
    weights   gives way last
    """

    weights: GivesWay | None = None

    def __init__(self, planning: Planning, resources: Resources, nodes: SessionNodes, ranks: Ranks | None) -> None:
        self.times = 0
        self._planning = planning
        self._nodes = nodes
        self._ranks = ranks
        self._device = nodes.table.device
        self._states = StatesGiveWay(planning, resources)
        self._slots = SlotsGiveWay(nodes.fetched, ranks)
        self._short_in: str | None = None  # what has met the error, and nothing has given way since
        self._errors_seen = self._errors()
        self._patience_steps = PATIENCE_STEPS
        self._backward_ended = True  # since the last forward of the training
        self._steps_at_call = -1  # done when it began

    def before_call(self) -> RandomNumbers | None:
        """Before a forward of the loop; what `repeats` wants, None where it would not repeat it."""
        if not torch.is_grad_enabled():
            return None
        if self._short_in is None and self._was_broken_off() and self._errors() > self._errors_seen:
            self._short_in = "code outside the model"
        steps_done, since = self._planning.last.steps_done, self._states.since_step
        self._backward_ended, self._steps_at_call = False, steps_done
        if self._short_in is not None:
            self._give_way()
        elif since is not None and steps_done - since >= self._patience_steps and self._states.may_return(
                f"{self._patience_steps} steps after memory ran out it may be free again"):
            self._patience_steps *= 2
        may_give = self._states.may or self._slots.may or self._may_stream
        return RandomNumbers.now(self._device) if may_give and not self._ranks and not self._breaks else None

    def _errors(self) -> int:
        """How often memory has run out in this process where something was lost by it."""
        return _errors_of_allocator(self._device) - self._nodes.fetched.failures

    def _was_broken_off(self) -> bool:
        """Whether the last forward has had no backward, or no step, as a micro-batch has."""
        return not self._backward_ended or self._planning.last.steps_done == self._steps_at_call

    @property
    def _breaks(self) -> bool:
        """Whether a forward runs code between graphs, which may have done anything."""
        capture = self._planning.units.capture
        return capture is not None and bool(capture.breaks)

    @property
    def _has_graphs(self) -> bool:
        capture = self._planning.units.capture
        return capture is not None and bool(capture.graphs)

    @property
    def _may_stream(self) -> bool:
        return self.weights is not None and self.weights.may

    # ---- when it has run out ----

    def repeats(self, begun: RandomNumbers | None, error: torch.OutOfMemoryError) -> bool:
        """A forward has met the error. If its repetition is exact and has more memory: go back.

        Else the error says what would help.
        """
        self._short_in = "a forward"
        is_exact = begun is not None and self._has_graphs and not self._breaks  # only a graph has run
        if begun is None or not is_exact or self._nodes.gradients.any_in_place() or not self._give_way():
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
        self._backward_ended = True

    def _say(self, error: torch.OutOfMemoryError) -> None:
        """Add to the error what of ours is on the device, and what happens next or would help."""
        there = [f"{bytes_text(nbytes)} of {what}" for nbytes, what in
                 ((self._states.nbytes, "optimizer states"), (self._slots.nbytes, "slots for weights")) if nbytes]
        told = f"hytrain_fx has {' and '.join(there) or 'nothing of its own'} on the device. "
        if self._states.may:
            told += ("Before the next forward half of these states go to the host. Weights are as before this step: call "
                     "optimizer.zero_grad() and repeat it. ")
        elif self._may_stream and not self._slots.may:
            told += ('weights="auto" left the weights on the device. Before the next forward that finds no gradient in place they go to '
                     "the host and are streamed: call optimizer.zero_grad() and repeat the step. ")
        told += "Smaller micro-batches and activation checkpointing take less"
        if self._states.nbytes and self._states.is_fixed:
            told += "; so does a smaller gpu_states, which the options fix here"
        error.add_note(told)

    def _give_way(self) -> bool:
        """Whether anything does, now or as a plan that the next forward puts in force."""
        where, self._short_in = self._short_in, None
        self._errors_seen = self._errors()
        why = f"memory ran out in {where} after {self._planning.last.steps_done} steps"
        gives = self._states.give(why)
        gives |= self._slots.give(why)
        gives |= self._nodes.gradients.stream_out()
        if not gives and self.weights is not None and self._may_stream:
            if self._nodes.gradients.any_in_place():
                self._short_in = where  # one would lose its slot: before a later forward
                return False
            gives = self.weights.give(why)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # pieces of what was there lie between others
        self.times += gives
        return gives


def _errors_of_allocator(device: torch.device) -> int:
    """How often torch's allocator has run out of the device's memory in this process."""
    if device.type != "cuda":
        return 0
    count: int = torch.cuda.memory_stats_as_nested_dict(device).get("num_ooms", 0)  # nothing before its first use
    return count
