"""Device memory that streamed weights pass through: slots, and the stream that fills them.

    take        an idle slot of the size, the one that was read longest ago; else a new one
    filled      a copy on the lane fills it: readers wait for `ready`
    give        the readers that were launched by now are the last: the next copy waits for `free`

A slot that was given keeps what it has until it is taken for something else. Slots are made when
they are first needed, or all that a plan counts on at once (`make`), and stay until the model is
closed, so nothing is torn into pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hytrain_fx.runtime import memory

_ALIGN_BYTES = 512


@dataclass(slots=True, eq=False)
class Slot:
    """One part of the device's memory.

    memory    uint8, flat
    unit      number of the unit whose weights are there, or were; None before the first
    holds     whether its weights are there, as of the last update
    ahead     they were brought or kept ahead of need, and nobody has read them since
    ready     when the last copy into it has come; None on the CPU
    free      when the last reader before that copy has run; None on the CPU
    """

    memory: torch.Tensor
    unit: int | None = None
    holds: bool = False
    ahead: bool = False
    ready: torch.cuda.Event | None = None
    free: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return self.memory.nbytes


class CopyLane:
    """A stream beside the one that computes. On the CPU copies are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def current(self, *after: torch.cuda.Event | None) -> Iterator[None]:
        """It is the current stream meanwhile, and waits for these events first."""
        with torch.cuda.stream(self._stream):
            for event in after:
                wait_for(event, self._device)
            yield

    def point(self) -> torch.cuda.Event | None:
        """When all that is on the lane by now has run."""
        return None if self._stream is None else self._stream.record_event()

    def present(self) -> torch.cuda.Event | None:
        """When all that is on the current stream by now has run."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()


def wait_for(event: torch.cuda.Event | None, device: torch.device) -> None:
    """The current stream waits for the event."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


class SlotPool:
    """The slots of one session.

    of_a_size   so many are made of each size before one that was filled ahead of need is taken
                from its unit
    lacking     by size of which there is no room for so many: how many there are
    failures    how often there was none though there seemed to be: torch counts an error each time
    """

    def __init__(self, device: torch.device, of_a_size: int) -> None:
        self.slots: list[Slot] = []
        self.of_a_size = of_a_size
        self.lacking: dict[int, int] = {}
        self.failures = 0
        self._device = device
        self._idle: list[Slot] = []  # given longest ago first

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.nbytes for slot in self.slots)

    def make(self, units: Iterable[int]) -> None:
        """Make those that are missing for these units, if the device has room for all of them.

        units   bytes of each unit in its slot
        """
        missing = _at_once(units, self.of_a_size) - Counter(slot.nbytes for slot in self.slots)
        if sum(missing.elements()) <= memory.room_bytes(self._device, 0):
            self._idle.extend(filter(None, map(self._made_if_room, missing.elements())))

    def take(self, nbytes: int) -> Slot:
        """A slot of at least that size, for what is needed now.

        Raises torch.OutOfMemoryError where one would have to be made.
        """
        wanted = slot_bytes(nbytes)
        slot = self._take_idle(wanted) or self._made_within_limit(wanted)
        slot = slot or self._take_idle(wanted) or self._take_filled_ahead(wanted) or self._make(wanted)
        slot.ahead = False
        return slot

    def take_ahead(self, nbytes: int) -> Slot | None:
        """The same for what is brought ahead of need.

        None where all of the size are taken that are to be made, or that there is room for.
        """
        wanted = slot_bytes(nbytes)
        return self._take_idle(wanted) or self._made_within_limit(wanted)

    def use(self, slot: Slot) -> None:
        """Its weights are still there and are about to be read."""
        slot.ahead = False
        if slot in self._idle:
            self._idle.remove(slot)

    def keep(self, slot: Slot) -> None:
        """Its weights are still there and are needed soon: it counts as filled ahead of need."""
        if slot in self._idle:
            self._idle.remove(slot)
            slot.ahead = True

    def give(self, slot: Slot) -> None:
        """Nobody who comes from now on reads it, until it is taken or used again."""
        slot.ahead = False
        self._idle.append(slot)

    def is_idle(self, slot: Slot) -> bool:
        """Whether it was given, and not taken or used since."""
        return slot in self._idle

    def clear(self) -> None:
        """Let go of all memory; storages that still have a part of it keep it alive."""
        self.slots.clear()
        self._idle.clear()
        self.lacking.clear()

    def _take_idle(self, wanted: int) -> Slot | None:
        exact = next((slot for slot in self._idle if slot.nbytes == wanted), None)
        full = self._has_all(wanted)
        found = exact or (min((s for s in self._idle if s.nbytes > wanted), key=lambda s: s.nbytes, default=None) if full else None)
        if found is not None:
            self._idle.remove(found)
        return found

    def _made_within_limit(self, wanted: int) -> Slot | None:
        """A backward cannot be repeated with fewer, so it goes on with those that there are."""
        if self._has_all(wanted):
            return None
        made = self._made_if_room(wanted)
        if made is None:
            self.lacking[wanted] = self._count(wanted)
        return made

    def _has_all(self, wanted: int) -> bool:
        return self._count(wanted) >= self.lacking.get(wanted, self.of_a_size)

    def _made_if_room(self, wanted: int) -> Slot | None:
        """Not tried without room: torch would count an error, and something else would give way."""
        if memory.room_bytes(self._device, 0) < wanted:
            return None
        try:
            return self._make(wanted)
        except torch.OutOfMemoryError:  # the room is in pieces
            self.failures += 1
            return None

    def _take_filled_ahead(self, wanted: int) -> Slot | None:
        return next((slot for slot in reversed(self.slots) if slot.ahead and slot.nbytes >= wanted), None)

    def _count(self, wanted: int) -> int:
        return Counter(slot.nbytes for slot in self.slots)[wanted]

    def _make(self, wanted: int) -> Slot:
        with torch.inference_mode(False):  # training is given the slot later, and writes to it
            memory = torch.empty(wanted, dtype=torch.uint8, device=self._device)
        slot = Slot(memory)
        if self._device.type == "cuda":  # what had this memory before may still be read on the stream that it comes from
            slot.free = torch.cuda.current_stream(self._device).record_event()
        self.slots.append(slot)
        return slot


def bytes_of_slots(units: Iterable[list[int]], of_a_size: int) -> int:
    """Bytes of the slots once `of_a_size` units of each size are there at once.

    units       the sizes of each unit's weights
    of_a_size   as `SlotPool` has it
    """
    return sum(_at_once((places_in_slot(sizes)[1] for sizes in units), of_a_size).elements())


def _at_once(units: Iterable[int], of_a_size: int) -> Counter[int]:
    """How many slots of each size these units may fill at once."""
    return Counter({nbytes: min(count, of_a_size) for nbytes, count in Counter(units).items()})


def slot_bytes(nbytes: int) -> int:
    """Bytes of a slot for so many bytes of weights."""
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def places_in_slot(sizes: list[int]) -> tuple[list[int], int]:
    """Where in a slot weights of these sizes go, each aligned; and how many bytes they take."""
    begins, end = [], 0
    for nbytes in sizes:
        begins.append(end)
        end += slot_bytes(nbytes)
    return begins, end
