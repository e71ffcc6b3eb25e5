"""Slots that streamed weights pass through, memory under storages, and the order of fetches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hytrain_fx.errors import EngineError
from hytrain_fx.runtime import memory
from hytrain_fx.runtime.native.storage_memory import put_memory, take_memory
from hytrain_fx.runtime.states.streamed_homes import may_stream
from hytrain_fx.weights.device_slots import Slot, SlotPool, bytes_of_slots, places_in_slot, slot_bytes
from hytrain_fx.weights.fetch_order import FetchOrder

CPU = torch.device("cpu")


def test_every_view_of_a_storage_sees_the_memory_that_is_put_under_it() -> None:
    """Views from before too; the version does not count up, and the source lives as long."""
    weight = nn.Parameter(torch.zeros(2, 3))
    view, version = weight.detach().t(), weight._version
    source = torch.arange(20.0)
    put_memory(weight, source, 8, 24)
    del source
    assert torch.equal(view, torch.arange(2.0, 8.0).view(2, 3).t())
    assert weight._version == version
    take_memory(weight)
    assert view.untyped_storage().nbytes() == 0
    put_memory(weight, torch.ones(6), 0, 24)
    assert float(view.sum()) == 6


def test_memory_outside_the_source_is_refused() -> None:
    """A part that the source does not have is an error, and nothing is changed."""
    weight = torch.zeros(4)
    with pytest.raises(EngineError, match="16 bytes from byte 4 were asked for of 16"):
        put_memory(weight, torch.ones(4), 4, 16)
    assert float(weight.sum()) == 0


def test_which_parameters_may_be_given_other_memory() -> None:
    """bf16 matrices that have their memory to themselves; no vectors, parts, or shared memory."""
    matrix = torch.zeros(4, 4, dtype=torch.bfloat16)
    assert may_stream(matrix)
    assert may_stream(torch.zeros(4, 4, dtype=torch.bfloat16).t())
    assert not may_stream(matrix[:2])
    assert not may_stream(torch.zeros(4, dtype=torch.bfloat16))
    assert not may_stream(torch.zeros(4, 4))
    assert not may_stream(torch.zeros(4, 4, dtype=torch.bfloat16).share_memory_())
    assert not may_stream(torch.frombuffer(bytearray(32), dtype=torch.bfloat16).view(4, 4))


def test_slots_of_one_size_are_used_in_turn() -> None:
    """So many are made as are wanted of a size; then the one that was read longest ago is taken."""
    pool = SlotPool(CPU, 2)
    first, second = pool.take(1000), pool.take(1000)
    assert first.nbytes == slot_bytes(1000) == 1024
    assert pool.take_ahead(1000) is None, "ahead of need no more memory is taken"
    pool.give(second)
    pool.give(first)
    assert pool.take(700) is second
    assert pool.take(1000) is first
    assert len(pool.slots) == 2
    third = pool.take(1000)  # all are read at once: what is needed gets a slot
    assert third not in (first, second)
    assert pool.nbytes == 3 * 1024


def test_what_was_brought_ahead_gives_way_to_what_is_needed() -> None:
    """No memory is taken while a slot holds something that nobody has asked for."""
    pool = SlotPool(CPU, 2)
    pool.take(1024)
    ahead = pool.take_ahead(1024)
    assert ahead is not None
    ahead.ahead = True
    assert pool.take(1024) is ahead
    assert not ahead.ahead
    assert len(pool.slots) == 2


def test_without_room_there_are_as_many_slots_as_could_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more comes ahead. What is needed takes a larger one, or one filled ahead."""
    pool = SlotPool(CPU, 3)
    large, first = pool.take(4096), pool.take(1024)
    ahead = pool.take_ahead(1024)
    assert ahead is not None
    ahead.ahead = True
    pool.give(large)
    monkeypatch.setattr(SlotPool, "_make", no_room)
    assert pool.take(1024) is large
    assert (pool.of_a_size, pool.lacking) == (3, {1024: 2})
    assert pool.take_ahead(1024) is None
    assert pool.take(1024) is ahead
    with pytest.raises(torch.OutOfMemoryError):
        pool.take(1024)
    assert pool.slots == [large, first, ahead]


def test_a_size_without_any_slot_takes_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """That there is no room for one size says nothing of others."""
    pool = SlotPool(CPU, 4)
    larger = [pool.take(4096) for _ in range(3)]
    for slot in larger:
        pool.give(slot)
    with monkeypatch.context() as patch:
        patch.setattr(SlotPool, "_make", no_room)
        assert pool.take(1024) is larger[0]
    assert pool.lacking == {1024: 0}
    assert pool.failures == 1
    assert [pool.take_ahead(4096) for _ in range(2)] == larger[1:]
    assert pool.take_ahead(4096) not in (*larger, None)


def test_no_slot_is_tried_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts each error of its allocator, and something else would give way for it later."""
    pool = SlotPool(CPU, 2)
    first = pool.take(1024)
    monkeypatch.setattr(memory, "room_bytes", lambda device, own_bytes: 1023)
    monkeypatch.setattr(SlotPool, "_make", no_room)
    assert pool.take_ahead(1024) is None
    pool.give(first)
    assert pool.take(1024) is first
    assert pool.failures == 0


def no_room(pool: SlotPool, wanted: int) -> Slot:
    """In the place of `SlotPool._make`."""
    raise torch.OutOfMemoryError("no slots fit")


def test_sizes_have_slots_of_their_own() -> None:
    """A larger slot serves a smaller unit only once its own size has all its slots."""
    pool = SlotPool(CPU, 1)
    large = pool.take(4096)
    pool.give(large)
    small = pool.take(512)
    assert small is not large
    assert pool.take(512) is large


def test_slots_that_are_missing_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of a size as are wanted, and never more than units have it."""
    pool = SlotPool(CPU, 2)
    first = pool.take(1024)
    monkeypatch.setattr(memory, "room_bytes", lambda device, own_bytes: 1024 + 511)
    pool.make([1024, 1024, 1024, 512])
    assert len(pool.slots) == 1, "there is no room for all"
    monkeypatch.setattr(memory, "room_bytes", lambda device, own_bytes: 1024 + 512)
    pool.make([1024, 1024, 1024, 512])
    assert sorted(slot.nbytes for slot in pool.slots) == [512, 1024, 1024]
    assert pool.nbytes == bytes_of_slots([[1000], [1024], [1024], [512]], 2)
    assert pool.take(1024) not in (first, None)
    assert len(pool.slots) == 3


def test_a_slot_that_was_given_keeps_what_it_has() -> None:
    """It may be used again as it is, until it is taken."""
    pool = SlotPool(CPU, 1)
    slot = pool.take(512)
    pool.give(slot)
    assert pool.is_idle(slot)
    pool.use(slot)
    assert not pool.is_idle(slot)
    assert pool.take(512) is not slot


def test_weights_stand_aligned_in_a_slot() -> None:
    """Each begins at a multiple of 512 bytes."""
    assert places_in_slot([100, 512, 513]) == ([0, 512, 1024], 2048)


def test_the_order_is_that_of_the_last_step() -> None:
    """Forward and backward; a unit that comes twice is found where it is expected."""
    order = FetchOrder()
    for unit in (0, 1, 2, 2, 1, 0):
        assert order.needed(unit, 2) == ()
    order.stepped()
    found = [list(order.needed(unit, 2)) for unit in (0, 1, 2, 2, 1, 0)]
    assert found == [[1, 2], [2, 2], [2, 1], [1, 0], [0], []]


def test_an_order_that_changes_is_learned_again() -> None:
    """An evaluation in between, another branch: the next unit that is shared finds the place."""
    order = FetchOrder()
    for unit in (0, 1, 2, 3):
        order.needed(unit, 1)
    order.stepped()
    assert [list(order.needed(unit, 1)) for unit in (0, 5, 2, 3, 0, 1)] == [[1], [], [3], [], [1], [2]]
    order.stepped()
    assert list(order.needed(5, 1)) == [2]
    order.stepped()
    order.stepped()  # a step without a forward changes nothing
    assert list(order.needed(5, 1)) == []


def test_evaluations_are_no_part_of_a_step() -> None:
    """They are told what comes next, and the next step expects none."""
    order = FetchOrder()
    for unit in (0, 1, 1, 0):
        order.needed(unit, 1)
    order.stepped()
    assert [list(order.needed(unit, 1, evaluates=True)) for unit in (0, 1)] == [[1], [1]]
    found = [list(order.needed(unit, 1)) for unit in (0, 1, 1, 0)]
    order.stepped()
    assert [list(order.needed(unit, 1)) for unit in (0, 1, 1, 0)] == [[1], [1], [0], []]
    assert found[-1] == []
    assert order.units == {0, 1}


def test_a_slot_made_in_inference_mode_serves_training() -> None:
    """An evaluation may be the first to need it; training writes to it later."""
    pool = SlotPool(CPU, 1)
    with torch.inference_mode():
        slot = pool.take(512)
    assert not slot.memory.is_inference()
